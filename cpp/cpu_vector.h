// Vectors of kVectorBytes, exp and tanh of vectors, and the matrix product of tiles. Included once for each
// instruction set, without an include guard, inside its namespace: see cpu_unit.h.

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename VectorOf<T>::Type;
// Integers as wide as T.
template <typename T>
using Int = std::conditional_t<std::is_same_v<T, double>, int64_t, int32_t>;

template <typename T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);

template <typename T>
INLINE Vec<T> Load(const T* from) {
  Vec<T> x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <typename T>
INLINE void Store(T* to, Vec<T> x) {
  __builtin_memcpy(to, &x, sizeof(x));
}
template <typename T>
INLINE Vec<T> Broadcast(T x) {
  return x - Vec<T>{};  // x - 0 is x for every x, also -0
}

// Returns x. The compiler cannot fuse the product that made x with a later subtraction, which would use x
// before it is rounded.
template <typename V>
INLINE V Rounded(V x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}

// ---- exp and tanh ----

template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr int kDegree = 7;
  static constexpr int kMantissaBits = 23;
  static constexpr int32_t kExponentBias = 127;
  static constexpr float kRound = 0x1.8p23f;  // x + kRound - kRound rounds x to an integer
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kMin = -87.33654f, kMax = 88.37626f;
};
template <>
struct ExpConstants<double> {
  static constexpr int kDegree = 13;
  static constexpr int kMantissaBits = 52;
  static constexpr int64_t kExponentBias = 1023;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kMin = -708.39641853226408, kMax = 709.43613930310391;
};

// 1 / i!
constexpr double kInverseFactorials[] = {
    1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};

// exp(x) = power * (1 + fraction). power is 2^n for the integer n nearest to x / ln 2, and fraction the
// Taylor polynomial of exp(r) - 1 for the remainder r, |r| <= ln(2) / 2. Holds within [kMin, kMax], where
// power and result are normal numbers; NaN gives NaN.
template <typename T>
INLINE void SplitExp(Vec<T> x, Vec<T>& power, Vec<T>& fraction) {
  using C = ExpConstants<T>;
  const Vec<T> shifted = x * T(1.4426950408889634074) + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  const Vec<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  const Vec<Int<T>> bits = (Vec<Int<T>>)shifted;  // n is in the low bits; the shift drops those above
  power = (Vec<T>)((bits + C::kExponentBias) << C::kMantissaBits);
  Vec<T> polynomial = Broadcast(T(kInverseFactorials[C::kDegree]));
#pragma GCC unroll 16
  for (int i = C::kDegree - 1; i > 0; --i) polynomial = polynomial * r + T(kInverseFactorials[i]);
  fraction = polynomial * r;
}

// exp(x); 0 below the smallest normal number, and infinity from 2^127.5 (2^1023.5) on.
template <typename T>
INLINE Vec<T> Exp(Vec<T> x) {
  using C = ExpConstants<T>;
  Vec<T> power, fraction;
  SplitExp<T>(x, power, fraction);
  // Not fraction * power + power: the product may be denormal, and XLA flushes denormal numbers to 0.
  Vec<T> y = (fraction + T(1)) * power;
  y = x < C::kMin ? Vec<T>{} : y;
  return x > C::kMax ? Broadcast(std::numeric_limits<T>::infinity()) : y;
}

template <typename T>
INLINE Vec<T> Tanh(Vec<T> x) {
  const T limit = 20;  // tanh rounds to 1 from here on
  const Vec<T> magnitude = x < T(0) ? -x : x;
  const Vec<T> y = T(2) * (magnitude > limit ? Broadcast(limit) : magnitude);
  Vec<T> power, fraction;
  SplitExp<T>(y, power, fraction);
  const Vec<T> expm1 = fraction * power + (power - T(1));
  const Vec<T> t = expm1 / (expm1 + T(2));
  return x < T(0) ? -t : t;
}

// ---- Matrix product of tiles ----

// The block of the result held in registers: kRowStep rows of kColumnStep vectors.
constexpr int kRowStep = kVectorRegisters >= 32 ? 8 : 6;
constexpr int kColumnStep = 2;

enum class Layout { kRowMajor, kTransposed };
enum class Into { kOverwrite, kAccumulate };

constexpr int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// c[kRowStep, kColumns vectors] (+)= a[kRowStep, depth] b[depth, kColumns vectors].
template <Layout layout, Into into, int kColumns, typename T>
INLINE void MultiplyStep(int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                         int64_t c_stride) {
  Vec<T> sum[kRowStep][kColumns];
#pragma GCC unroll 8
  for (int row = 0; row < kRowStep; ++row) {
#pragma GCC unroll 2
    for (int column = 0; column < kColumns; ++column) {
      sum[row][column] = Vec<T>{};
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    Vec<T> b_row[kColumns];
#pragma GCC unroll 2
    for (int column = 0; column < kColumns; ++column)
      b_row[column] = Load(b + i * b_stride + column * kLanes<T>);
#pragma GCC unroll 8
    for (int row = 0; row < kRowStep; ++row) {
      const T x = layout == Layout::kTransposed ? a[i * a_stride + row] : a[row * a_stride + i];
#pragma GCC unroll 2
      for (int column = 0; column < kColumns; ++column) sum[row][column] += x * b_row[column];
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRowStep; ++row) {
#pragma GCC unroll 2
    for (int column = 0; column < kColumns; ++column) {
      T* to = c + row * c_stride + column * kLanes<T>;
      // Added as a whole: the error of a long sum grows with the number of blocks, not of terms.
      if constexpr (into == Into::kAccumulate) sum[row][column] += Load(to);
      Store(to, sum[row][column]);
    }
  }
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]. With kTransposed, a is stored as [depth, rows].
// Rows are rounded up to kRowStep and columns to a vector; the arrays must be large enough for both.
template <Layout layout, Into into, typename T>
void Multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_stride, const T* b,
              int64_t b_stride, T* c, int64_t c_stride) {
  int64_t column = 0;
  for (; column + kLanes<T> < columns; column += kColumnStep * kLanes<T>) {
    for (int64_t row = 0; row < rows; row += kRowStep) {
      MultiplyStep<layout, into, kColumnStep>(
          depth, layout == Layout::kTransposed ? a + row : a + row * a_stride, a_stride, b + column, b_stride,
          c + row * c_stride + column, c_stride);
    }
  }
  if (column >= columns) return;
  for (int64_t row = 0; row < rows; row += kRowStep) {
    MultiplyStep<layout, into, 1>(depth, layout == Layout::kTransposed ? a + row : a + row * a_stride,
                                  a_stride, b + column, b_stride, c + row * c_stride + column, c_stride);
  }
}
