// Device matrices and arrays of an operation's test, on every backend that this machine has.
// Owns their memory; knows no operation and no expected value.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/fp8/codec.h"
#include "kernels/backend.h"
#include "tests/catch.h"

namespace qe::test {

class DeviceArrays {
 public:
  explicit DeviceArrays(const std::string& backend)
      : name_(backend), backend_(make_backend(backend)), stream_(backend_.device->make_stream("test")) {}

  [[nodiscard]] bool is(const std::string& backend) const { return name_ == backend; }
  [[nodiscard]] Device& device() const { return *backend_.device; }
  [[nodiscard]] Ops& ops() const { return *backend_.ops; }
  [[nodiscard]] Stream& stream() const { return *stream_; }

  // Zeroed. pitch 0: contiguous; else elements from row to row, and the padding holds 0xAB bytes (see padding_intact).
  Tensor matrix(DType type, std::int64_t rows, std::int64_t cols, std::int64_t pitch = 0) {
    const std::int64_t step = pitch == 0 ? cols : pitch;
    const auto bytes = static_cast<std::size_t>(rows * step) * size_of(type);
    Tensor t{allocate(bytes), type, {rows, cols}, step};
    if (pitch != 0) {
      write(t.as<unsigned char>(), std::vector<unsigned char>(bytes, kPadding));
      set(t, std::vector<float>(static_cast<std::size_t>(rows * cols), 0.0f));
    }
    return t;
  }
  Tensor matrix(DType type, std::int64_t rows, std::int64_t cols, const std::vector<float>& values,
                std::int64_t pitch = 0) {
    const Tensor t = matrix(type, rows, cols, pitch);
    set(t, values);
    return t;
  }
  template <class T>
  T* array(const std::vector<T>& values) {
    auto* p = static_cast<T*>(allocate(values.size() * sizeof(T)));
    write(p, values);
    return p;
  }
  template <class T>
  void write(T* to, const std::vector<T>& values) {
    backend_.device->upload(*stream_, to, values.data(), values.size() * sizeof(T));
    backend_.device->synchronize(*stream_);
  }
  template <class T>
  std::vector<T> read(const T* from, std::size_t count) {
    std::vector<T> values(count);
    backend_.device->download(*stream_, values.data(), from, count * sizeof(T));
    backend_.device->synchronize(*stream_);
    return values;
  }

  // Row-major, without padding; rounded to nearest even (BF16) or saturated (FP8) when set.
  void set(const Tensor& t, const std::vector<float>& values) {
    std::vector<unsigned char> all = read(t.as<unsigned char>(), extent(t));
    for_each_element(t, [&](std::size_t i, std::size_t byte) { encode(t.dtype, values.at(i), &all[byte]); });
    write(t.as<unsigned char>(), all);
  }
  std::vector<float> get(const Tensor& t) {
    const std::vector<unsigned char> all = read(t.as<unsigned char>(), extent(t));
    std::vector<float> values(static_cast<std::size_t>(t.shape.elements()));
    for_each_element(t, [&](std::size_t i, std::size_t byte) { values[i] = decode(t.dtype, &all[byte]); });
    return values;
  }
  // The bytes of an FP8 matrix.
  std::vector<std::uint8_t> codes(const Tensor& t) {
    const std::vector<unsigned char> all = read(t.as<unsigned char>(), extent(t));
    std::vector<std::uint8_t> values(static_cast<std::size_t>(t.shape.elements()));
    for_each_element(t, [&](std::size_t i, std::size_t byte) { values[i] = all[byte]; });
    return values;
  }
  // Does everything between the rows still hold what matrix() put there?
  bool padding_intact(const Tensor& t) {
    std::vector<unsigned char> all = read(t.as<unsigned char>(), extent(t));
    for_each_element(t, [&](std::size_t, std::size_t byte) {
      for (std::size_t k = 0; k < size_of(t.dtype); ++k) all[byte + k] = kPadding;
    });
    for (const unsigned char byte : all) {
      if (byte != kPadding) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kPadding = 0xAB;

  void* allocate(std::size_t bytes) {
    buffers_.push_back(backend_.device->allocate(bytes, MemoryKind::kWorkspace));
    return buffers_.back().data();
  }
  // Bytes up to the end of the last row's pitch.
  static std::size_t extent(const Tensor& t) {
    return static_cast<std::size_t>(t.shape.rows * t.row_pitch) * size_of(t.dtype);
  }
  template <class Visit>
  static void for_each_element(const Tensor& t, const Visit& visit) {
    std::size_t i = 0;
    for (std::int64_t r = 0; r < t.shape.rows; ++r) {
      for (std::int64_t c = 0; c < t.shape.cols; ++c) {
        visit(i++, static_cast<std::size_t>(r * t.row_pitch + c) * size_of(t.dtype));
      }
    }
  }
  static void encode(DType type, float v, unsigned char* to) {
    if (type == DType::kF32) std::memcpy(to, &v, sizeof v);
    if (type == DType::kBF16) {
      const Bf16 b = to_bf16(v);
      std::memcpy(to, &b, sizeof b);
    }
    if (is_fp8(type)) *to = encode_fp8(type, v);
  }
  static float decode(DType type, const unsigned char* from) {
    if (is_fp8(type)) return decode_fp8(type, *from);
    if (type == DType::kBF16) {
      Bf16 b{};
      std::memcpy(&b, from, sizeof b);
      return to_float(b);
    }
    float v = 0.0f;
    std::memcpy(&v, from, sizeof v);
    return v;
  }

  std::string name_;
  Backend backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<Buffer> buffers_;
};

// Runs a test once a backend; on a machine without a CUDA device, or a build without CUDA, on the CPU alone.
inline void on_every_backend(const std::function<void(DeviceArrays&)>& test) {
  for (const char* name : {"cpu", "cuda"}) {
    std::unique_ptr<DeviceArrays> arrays;
    try {
      arrays = std::make_unique<DeviceArrays>(name);
    } catch (const ConfigError&) {
      continue;  // not in this build
    } catch (const DeviceError& e) {
      WARN("skipped: " << e.what());
      continue;
    }
    INFO("backend " << name);
    test(*arrays);
  }
}

}  // namespace qe::test
