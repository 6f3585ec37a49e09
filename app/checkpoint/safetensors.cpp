#include "app/checkpoint/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kPrefix = 8;
constexpr std::int64_t kLargestSide = std::int64_t{1} << 40;

std::string header_text(const std::vector<StoredTensor>& tensors) {
  Json header{{"__metadata__", {{"format", "pt"}}}};
  std::uint64_t at = 0;
  for (const StoredTensor& t : tensors) {
    header[t.name] = {{"dtype", safetensors_name(t.dtype)},
                      {"shape", {t.shape.rows, t.shape.cols}},
                      {"data_offsets", {at, at + t.bytes()}}};
    at += t.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the buffer starts 8-byte aligned
  return text;
}

[[noreturn]] void unsound(const InputFile& file, const std::string& what) {
  throw CheckpointError(file.path() + " is no sound safetensors file: " + what +
                        "; restore it or use another checkpoint.");
}

Json parse_header(const InputFile& file, const std::string& text) {
  std::set<std::string> keys;
  bool duplicate = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth == 1 && event == Json::parse_event_t::key) duplicate |= !keys.insert(value.get<std::string>()).second;
    return true;
  };
  Json header = Json::parse(text, watch, false);
  if (!header.is_object()) unsound(file, "its header is no JSON object");
  if (duplicate) unsound(file, "its header has a tensor twice");
  return header;
}

StoredTensor tensor_of(const InputFile& file, const std::string& name, const Json& entry) {
  StoredTensor t{.name = name};
  const std::string dtype = entry.at("dtype").get<std::string>();
  if (dtype != "F32" && dtype != "BF16") unsound(file, name + " has dtype " + dtype + ", wanted F32 or BF16");
  t.dtype = dtype == "F32" ? DType::kF32 : DType::kBF16;
  const auto sides = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
  if (sides.size() != 2 || offsets.size() != 2) unsound(file, name + " is no matrix with two offsets");
  for (const std::int64_t side : sides) {
    if (side < 0 || side > kLargestSide) unsound(file, name + " has an impossible shape");
  }
  if (sides[1] != 0 && sides[0] > kLargestSide / sides[1]) unsound(file, name + " has an impossible shape");
  t.shape = {sides[0], sides[1]};
  t.offset = offsets[0];
  if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != t.bytes()) {
    unsound(file, name + " has other bytes than its shape needs");
  }
  return t;
}

}  // namespace

const char* safetensors_name(DType t) {
  QE_EXPECTS(t == DType::kF32 || t == DType::kBF16, "state is FP32 or BF16");
  return t == DType::kF32 ? "F32" : "BF16";
}

WrittenFile write_safetensors(OutputFile& file, const std::vector<StoredTensor>& tensors,
                              const std::function<Bytes(std::size_t)>& read) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  WrittenFile out;
  const auto write = [&](Bytes bytes) {
    XXH3_64bits_update(state.get(), bytes.data(), bytes.size());
    file.write(bytes);
    out.bytes += bytes.size();
  };
  const std::string header = header_text(tensors);
  unsigned char prefix[kPrefix];
  for (std::size_t i = 0; i < kPrefix; ++i) prefix[i] = static_cast<unsigned char>(header.size() >> (8 * i) & 255);
  write(prefix);
  write({reinterpret_cast<const unsigned char*>(header.data()), header.size()});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Bytes bytes = read(i);
    QE_EXPECTS(bytes.size() == tensors[i].bytes(), "a tensor has the bytes of its shape");
    write(bytes);
    out.tensors.push_back(digest_of(bytes));
  }
  file.finish();
  out.digest = hex_digest(XXH3_64bits_digest(state.get()));
  return out;
}

std::vector<StoredTensor> read_safetensors_header(const InputFile& file) {
  if (file.size() < kPrefix) unsound(file, "it has " + std::to_string(file.size()) + " bytes");
  unsigned char prefix[kPrefix];
  file.read(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kPrefix; ++i) length |= std::uint64_t{prefix[i]} << (8 * i);
  if (length > kLongestHeader || length > file.size() - kPrefix) unsound(file, "its header is longer than the file");
  std::string text(length, '\0');
  file.read(kPrefix, {reinterpret_cast<unsigned char*>(text.data()), text.size()});
  const Json header = parse_header(file, text);

  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {
      tensors.push_back(tensor_of(file, name, entry));
    } catch (const nlohmann::json::exception&) {
      unsound(file, name + " lacks dtype, shape or data_offsets");
    }
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.offset < b.offset; });
  std::uint64_t at = 0;
  for (StoredTensor& t : tensors) {
    if (t.offset != at) unsound(file, "there is a hole or an overlap before " + t.name);
    at += t.bytes();
    t.offset += kPrefix + length;
  }
  if (at != file.size() - kPrefix - length) unsound(file, "its tensors do not fill it");
  return tensors;
}

}  // namespace qe
