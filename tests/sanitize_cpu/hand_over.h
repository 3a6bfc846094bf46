// Included before every unit of the CPU kernels; makes workers yield at random where one waits for another.
#pragma once

namespace sanitize_cpu {
void MaybeYield();
}  // namespace sanitize_cpu

#define HAND_OVER() ::sanitize_cpu::MaybeYield()
