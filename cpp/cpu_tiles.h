// Moves between the tensors in memory and the tiles in scratch. Included once for each instruction set,
// without an include guard, inside its namespace: see cpu_unit.h.

// Query rows (M) and keys (N) of a tile. They are multiples of every step of the products, which may then
// round up within a tile, and small enough for the scratch to stay in the L2 cache. The backward pass keeps
// its keys while the queries go past: the more keys, the less often q, dout and dq are moved.
constexpr int64_t kForwardM = 96, kForwardN = 96;
constexpr int64_t kBackwardM = 48, kBackwardN = 192;
static_assert(kForwardM % kRowStep == 0 && kForwardM % (kColumnStep * kLanes<float>) == 0);
static_assert(kForwardN % kRowStep == 0);
static_assert(kKeyUnit % kForwardN == 0 && kKeyUnit % kBackwardN == 0);
static_assert(kBackwardM % kRowStep == 0);
static_assert(kBackwardN % kRowStep == 0 && kBackwardN % (kColumnStep * kLanes<float>) == 0);

inline int64_t SizeOf(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// A place in a tensor of q's dtype. Kernels are compiled for float and for double, the types in which they
// compute; the type that is stored is looked up when a row is read or written.
template <typename Void>  // void or const void
struct Stored {
  Void* data;
  DType dtype;

  Stored operator+(int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return {static_cast<Byte*>(data) + elements * SizeOf(dtype), dtype};
  }
};
template <typename Void>
Stored(Void*, DType) -> Stored<Void>;

// Calls `function` with the place as a pointer to the type that is stored there; T is the type to compute in.
template <typename T, typename Void, typename Function>
INLINE auto Visit(Stored<Void> place, const Function& function) {
  const auto as = [&]<typename Storage>(std::type_identity<Storage>) {
    return function(
        static_cast<std::conditional_t<std::is_const_v<Void>, const Storage, Storage>*>(place.data));
  };
  if constexpr (std::is_same_v<T, float>) {
    if (place.dtype == DType::kFloat16) return as(std::type_identity<Half>());
    if (place.dtype == DType::kBFloat16) return as(std::type_identity<BFloat16>());
  }
  return as(std::type_identity<T>());
}

// Whether tensors of this dtype are stored in the type T in which they are computed.
template <typename T>
bool IsComputeType(DType dtype) {
  return SizeOf(dtype) == sizeof(T);
}

// The query rows of one batch element and key head: those of all query heads that read it, ordered by query,
// then by head. They share its keys, so they fill tiles together. Row r belongs to query r / group.
template <typename Place>  // a pointer, or Stored
struct GroupRows {
  Place data;      // element [batch, 0, first head of the group, 0]
  int64_t stride;  // from one query to the next
  int64_t group;   // query heads per key head
  int64_t width;   // elements of a row

  GroupRows(Place tensor, const AttentionParams& params, int64_t batch, int64_t kv_head, int64_t width)
      : data(tensor), stride(params.num_heads * width), group(GroupSize(params)), width(width) {
    data = data + (batch * params.seqlen_q * stride + kv_head * group * width);
  }
  Place Row(int64_t row) const { return data + (row / group * stride + row % group * width); }
};

// The rows of one batch element and key head in k, v or their gradients.
template <typename Place>
struct KeyRows {
  const AttentionParams& params;
  const int32_t* page_indices;  // null: the rows follow each other
  Place data;
  int64_t stride;
  int64_t width;

  KeyRows(Place tensor, const AttentionParams& params, int64_t batch, int64_t kv_head, int64_t width)
      : params(params),
        page_indices(params.page_indices),
        data(tensor),
        stride(params.num_kv_heads * width),
        width(width) {
    data = data + kv_head * width;
    if (page_indices) {
      page_indices += batch * params.pages_per_sequence;
    } else {
      data = data + batch * params.seqlen_kv * stride;
    }
  }
  Place Row(int64_t row) const {
    if (page_indices) {
      const int64_t size = params.page_size;
      row = params.page(page_indices[row / size]) * size + row % size;
    }
    return data + row * stride;
  }
};

// Copies the tensor's rows [first, end) to the rows of a tile, each padded with zeros to tile_stride. Rows
// for which `keep` (indexed by row of the tile; may be null) is false, and rows from `end` to tile_rows, are
// zeros.
template <typename T, typename Rows>
NOINLINE void LoadRows(const Rows& tensor, int64_t first, int64_t end, const bool* keep, T* tile,
                       int64_t tile_stride, int64_t tile_rows) {
  for (int64_t row = 0; row < tile_rows; ++row) {
    T* to = tile + row * tile_stride;
    int64_t column = 0;
    if (first + row < end && (!keep || keep[row])) {
      Visit<T>(tensor.Row(first + row), [&](const auto* from) {
        for (; column < tensor.width; ++column) to[column] = ToCompute(from[column]);
      });
    }
    for (; column < tile_stride; ++column) to[column] = 0;
  }
}

// Transposes tile [rows, columns] into transposed [columns, rows]; rows is a multiple of kLanes.
template <typename T>
NOINLINE void Transpose(const T* tile, int64_t tile_stride, int64_t rows, int64_t columns, T* transposed,
                        int64_t transposed_stride) {
  for (int64_t row = 0; row < rows; row += kLanes<T>) {
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
        transposed[column * transposed_stride + row + lane] = tile[(row + lane) * tile_stride + column];
      }
    }
  }
}

template <typename T>
void StoreRow(Stored<void> place, const T* from, T factor, int64_t width) {
  Visit<T>(place, [&]<typename Storage>(Storage* to) {
    for (int64_t column = 0; column < width; ++column)
      to[column] = FromCompute<Storage>(from[column] * factor);
  });
}

void ZeroRow(Stored<void> to, int64_t width) { __builtin_memset(to.data, 0, width * SizeOf(to.dtype)); }

template <typename T>
void Zero(T* tile, int64_t count) {
  __builtin_memset(tile, 0, count * sizeof(T));
}

// The factor of q . k in the logits.
template <typename T>
T LogitScale(const AttentionParams& params, int64_t batch) {
  const T* factors = static_cast<const T*>(params.scale_factor);
  return static_cast<T>(params.options.scale) * (factors ? factors[batch] : T(1));
}

// The soft cap; 0: none.
template <typename T>
T LogitCap(const AttentionParams& params) {
  return static_cast<T>(params.options.logits_soft_cap);
}

// scale * s, capped. The derivative of the cap is 1 - (s / cap)^2 of the result. It is rounded in every pass:
// lse comes from rounded logits.
template <typename T>
INLINE Vec<T> Logits(Vec<T> products, T scale, T cap) {
  const Vec<T> s = products * scale;
  return Rounded(cap > 0 ? cap * Tanh<T>(s / cap) : s);
}
