// Double-precision matrices and the three products of a linear layer as plain loops, for the reference step.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace qe::testing {

class Matrix {
 public:
  Matrix() = default;
  Matrix(int rows, int cols) : rows_(rows), cols_(cols), values_(static_cast<std::size_t>(rows) * cols) {}

  [[nodiscard]] int rows() const { return rows_; }
  [[nodiscard]] int cols() const { return cols_; }
  double& operator()(int r, int c) { return values_[static_cast<std::size_t>(r) * cols_ + c]; }
  double operator()(int r, int c) const { return values_[static_cast<std::size_t>(r) * cols_ + c]; }
  [[nodiscard]] std::vector<double>& values() { return values_; }
  [[nodiscard]] const std::vector<double>& values() const { return values_; }

 private:
  int rows_ = 0, cols_ = 0;
  std::vector<double> values_;
};

inline double norm(const Matrix& m) {
  double sum = 0.0;
  for (const double v : m.values()) sum += v * v;
  return std::sqrt(sum);
}

// The nearest value with eight significant bits, ties to even: what one rounding to BF16 leaves.
inline double round_to_bf16(double v) {
  int exponent = 0;
  const double mantissa = std::frexp(v, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

// x [T, in] · w [out, in] transposed.
inline Matrix times_transposed(const Matrix& x, const Matrix& w) {
  Matrix y(x.rows(), w.rows());
  for (int t = 0; t < x.rows(); ++t) {
    for (int o = 0; o < w.rows(); ++o) {
      double sum = 0.0;
      for (int i = 0; i < x.cols(); ++i) sum += x(t, i) * w(o, i);
      y(t, o) = sum;
    }
  }
  return y;
}

// dy [T, out] · w [out, in].
inline Matrix times(const Matrix& dy, const Matrix& w) {
  Matrix dx(dy.rows(), w.cols());
  for (int t = 0; t < dy.rows(); ++t) {
    for (int o = 0; o < w.rows(); ++o) {
      for (int i = 0; i < w.cols(); ++i) dx(t, i) += dy(t, o) * w(o, i);
    }
  }
  return dx;
}

// dy [T, out] transposed · x [T, in].
inline Matrix transposed_times(const Matrix& dy, const Matrix& x) {
  Matrix dw(dy.cols(), x.cols());
  for (int t = 0; t < x.rows(); ++t) {
    for (int o = 0; o < dy.cols(); ++o) {
      for (int i = 0; i < x.cols(); ++i) dw(o, i) += dy(t, o) * x(t, i);
    }
  }
  return dw;
}

}  // namespace qe::testing
