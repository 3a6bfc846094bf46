# The one list of compiled kernels: jax_flash_kernel(direction arch arithmetic head_dim).
#
# Each row becomes a translation unit, made from kernel.cu.in, and an entry of dispatch.cu's table. `direction` and
# `arch` name the header (cuda/<arch>/<direction>.cuh); `arithmetic` is a type of cuda/arithmetic.h. A head dim in
# between runs on the next larger kernel, filled with zeros.
set(JAX_FLASH_HEAD_DIMS 64 96 128 192 256 CACHE STRING "Head dims for which CUDA kernels are compiled")

if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  foreach(head_dim IN LISTS JAX_FLASH_HEAD_DIMS)
    jax_flash_kernel(forward sm90 bfloat16 ${head_dim})
    jax_flash_kernel(forward sm90 float16 ${head_dim})
    # Gradients of 96 and 192 columns run on the kernels for 128 and 256.
    if(NOT head_dim MATCHES "^(96|192)$")
      foreach(direction IN ITEMS backward backward_dq)
        jax_flash_kernel(${direction} sm90 bfloat16 ${head_dim})
        jax_flash_kernel(${direction} sm90 float16 ${head_dim})
      endforeach()
    endif()
  endforeach()
endif()

# Tiles of 96 and 192 columns would save little over those of 128 and 256, and take a minute to compile.
set(sm80_head_dims ${JAX_FLASH_HEAD_DIMS})
list(REMOVE_ITEM sm80_head_dims 96 192)
foreach(head_dim IN LISTS sm80_head_dims)
  foreach(arithmetic IN ITEMS bfloat16 float16 tf32 tf32x3)
    jax_flash_kernel(forward sm80 ${arithmetic} ${head_dim})
    jax_flash_kernel(backward sm80 ${arithmetic} ${head_dim})
    jax_flash_kernel(backward_dq sm80 ${arithmetic} ${head_dim})
  endforeach()
endforeach()

# The gradient of a bias with both a query and a key axis; other shapes run on the sm80 kernel below.
if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  foreach(head_dim IN ITEMS 64 128)
    if(head_dim IN_LIST JAX_FLASH_HEAD_DIMS)
      jax_flash_kernel(backward_bias sm90 bfloat16 ${head_dim})
      jax_flash_kernel(backward_bias sm90 float16 ${head_dim})
    endif()
  endforeach()
endif()

# This kernel takes the head dim in pieces: one serves every head dim.
if(sm80_head_dims)
  list(SORT sm80_head_dims COMPARE NATURAL)
  list(GET sm80_head_dims -1 largest_head_dim)
  foreach(arithmetic IN ITEMS bfloat16 float16 tf32 tf32x3)
    jax_flash_kernel(backward_bias sm80 ${arithmetic} ${largest_head_dim})
  endforeach()
endif()
