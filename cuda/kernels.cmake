# The one list of compiled kernels: jax_flash_kernels(direction arch arithmetics head_dim).
#
# Each row becomes a translation unit, made from kernel.cu.in, and an entry of dispatch.cu's table for each arithmetic.
# `direction` and `arch` name the header (cuda/<arch>/<direction>.cuh); `arithmetics` are types of cuda/arithmetic.h,
# which share a unit because headers and the host's code take seconds to compile. A head dim in between runs on the next
# larger kernel, filled with zeros.
set(JAX_FLASH_HEAD_DIMS 32 64 96 128 192 256 512 CACHE STRING "Head dims for which CUDA kernels are compiled")
option(JAX_FLASH_FLOAT64 "Compile CUDA kernels for float64" ON)
set(all_16_bit bfloat16 float16)
set(all_float32 tf32 tf32x3)

if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  foreach(head_dim IN LISTS JAX_FLASH_HEAD_DIMS)
    jax_flash_kernels(forward sm90 "${all_16_bit}" ${head_dim})
    # Head dims that cuda/tiles.h has tiles for; others run on the next larger kernel.
    if(head_dim MATCHES "^(32|64|96|128|192|256|512)$")
      foreach(direction IN ITEMS backward backward_dq)
        jax_flash_kernels(${direction} sm90 "${all_16_bit}" ${head_dim})
      endforeach()
    endif()
  endforeach()
endif()

# The gradient of a bias with both a query and a key axis, tangents where q, k and v all have one and no pair has
# options, and calls for few queries of up to 16 rows of a key head. Other calls run on the sm80 kernels below.
if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  foreach(head_dim IN ITEMS 64 128)
    if(head_dim IN_LIST JAX_FLASH_HEAD_DIMS)
      foreach(direction IN ITEMS backward_bias tangent decode)
        jax_flash_kernels(${direction} sm90 "${all_16_bit}" ${head_dim})
      endforeach()
    endif()
  endforeach()
endif()

# float32 as scaled float16 (planes.cuh), at the precision of TF32.
if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  foreach(head_dim IN LISTS JAX_FLASH_HEAD_DIMS)
    if(head_dim MATCHES "^(32|64|96|128|192|256)$")
      foreach(direction IN ITEMS forward backward backward_dq)
        jax_flash_kernels(${direction} sm90 tf32 ${head_dim})
      endforeach()
    endif()
  endforeach()
  # In two planes each, as exact as three products of TF32.
  foreach(head_dim IN ITEMS 64 128)
    if(head_dim IN_LIST JAX_FLASH_HEAD_DIMS)
      foreach(direction IN ITEMS forward backward backward_dq)
        jax_flash_kernels(${direction} sm90 tf32x3 ${head_dim})
      endforeach()
    endif()
  endforeach()
endif()

# Not of 32, 96 and 192 columns, which would take a minute more: such calls run on the kernels of 64, 128 and 256. Nor of
# 512: out of 16 rows would take all registers of a warp.
set(sm80_head_dims ${JAX_FLASH_HEAD_DIMS})
list(REMOVE_ITEM sm80_head_dims 32 96 192 512)
if(NOT sm80_head_dims)
  message(FATAL_ERROR "JAX_FLASH_HEAD_DIMS must have 64, 128 or 256, for which there are portable kernels, got "
                      "\"${JAX_FLASH_HEAD_DIMS}\".")
endif()
foreach(head_dim IN LISTS sm80_head_dims)
  foreach(arithmetics IN ITEMS all_16_bit all_float32)
    foreach(direction IN ITEMS forward decode backward backward_dq tangent backward_tangent)
      # No tile of backward_tangent fits into shared memory for float32 and more columns than 128.
      if(NOT (direction STREQUAL "backward_tangent" AND arithmetics STREQUAL "all_float32" AND head_dim GREATER 128))
        jax_flash_kernels(${direction} sm80 "${${arithmetics}}" ${head_dim})
      endif()
    endforeach()
  endforeach()
  # Behind the gradients at "highest", for infinities and for key heads that planes do not hold.
  jax_flash_kernels(backward sm80 tf32x3_infinity ${head_dim})
  jax_flash_kernels(backward_dq sm80 tf32x3_infinity ${head_dim})
endforeach()

# float64. No tile fits into shared memory for more columns than 128, and those of backward_tangent for more than 64.
if(JAX_FLASH_FLOAT64)
  foreach(head_dim IN ITEMS 64 128)
    if(head_dim IN_LIST sm80_head_dims)
      foreach(direction IN ITEMS forward backward backward_dq tangent backward_tangent)
        if(NOT (direction STREQUAL "backward_tangent" AND head_dim GREATER 64))
          jax_flash_kernels(${direction} sm80 float64 ${head_dim})
        endif()
      endforeach()
      set(largest_float64 ${head_dim})
    endif()
  endforeach()
  if(largest_float64)
    jax_flash_kernels(backward_bias sm80 float64 ${largest_float64})
  endif()
endif()

# Short sequences. A tile of 32 columns has half of the bytes, which is most of the work; float32 has this one alone.
foreach(head_dim IN ITEMS 32 64)
  set(arithmetics ${all_16_bit})
  if(head_dim EQUAL 32)
    list(APPEND arithmetics tf32)
  endif()
  if(head_dim IN_LIST JAX_FLASH_HEAD_DIMS)
    foreach(direction IN ITEMS short_forward short_backward short_backward_bias)
      jax_flash_kernels(${direction} sm80 "${arithmetics}" ${head_dim})
    endforeach()
  endif()
endforeach()

# This kernel takes the head dim in pieces: one serves every head dim that another kernel serves.
set(largest_16_bit ${sm80_head_dims})
set(largest_float32 ${sm80_head_dims})
if(90 IN_LIST JAX_FLASH_CUDA_ARCHS)
  set(largest_16_bit ${JAX_FLASH_HEAD_DIMS})
endif()
foreach(arithmetics IN ITEMS 16_bit float32)
  list(SORT largest_${arithmetics} COMPARE NATURAL)
  list(GET largest_${arithmetics} -1 largest_head_dim)
  jax_flash_kernels(backward_bias sm80 "${all_${arithmetics}}" ${largest_head_dim})
endforeach()
