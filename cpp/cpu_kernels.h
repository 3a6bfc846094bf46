// The kernels for one instruction set (no include guard): see cpu_attention.cc, which says which.

#include "cpu_vector.h"

#include "cpu_tiles.h"

#include "cpu_pairs.h"

#include "cpu_forward.h"

#include "cpu_backward.h"

#include "cpu_backward_bias.h"
