#pragma once

#include <cuda.h>

using PFN_cuTensorMapEncodeTiled_v12000 = decltype(&encode_tensor_map);
