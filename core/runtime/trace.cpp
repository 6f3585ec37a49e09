#include "core/runtime/trace.h"

#include <xxhash.h>

#include "core/error.h"

namespace qe {

namespace {

const char* name_of(ProbeCategory category) {
  switch (category) {
    case ProbeCategory::kLayerOutput:
      return "layer output";
    case ProbeCategory::kLoss:
      return "loss";
    case ProbeCategory::kLayerInputGrad:
      return "layer dX";
    case ProbeCategory::kVectorGrad:
      return "vector gradient";
    case ProbeCategory::kMatrixGrad:
      return "matrix gradient";
    case ProbeCategory::kRetainedInput:
      return "retained X^T";
    case ProbeCategory::kRetainedOutputGrad:
      return "retained dY^T";
    case ProbeCategory::kScaleInv:
      return "scale_inv";
    case ProbeCategory::kAmaxHistory:
      return "amax history";
    case ProbeCategory::kScale:
      return "scale";
    case ProbeCategory::kMainGrad:
      return "main gradient";
  }
  return "?";
}

}  // namespace

std::string to_string(const TraceKey& k) {
  return "step " + std::to_string(k.step) + ", " + k.category + " of " + k.name +
         (k.microbatch < 0 ? "" : ", microbatch " + std::to_string(k.microbatch));
}

std::vector<std::string> differences(const TraceRecords& a, const TraceRecords& b, int limit) {
  std::vector<std::string> lines;
  const auto say = [&](const TraceKey& key, const char* what) {
    if (static_cast<int>(lines.size()) < limit) lines.push_back(to_string(key) + what);
  };
  for (const auto& [key, digest] : a) {
    const auto other = b.find(key);
    if (other == b.end()) {
      say(key, ": only in the first");
    } else if (other->second != digest) {
      say(key, ": differs");
    }
  }
  for (const auto& [key, digest] : b) {
    if (a.find(key) == a.end()) say(key, ": only in the second");
  }
  return lines;
}

struct TraceProbe::Sample {
  std::vector<unsigned char> bytes;
  std::int32_t microbatch = -1;
};

std::shared_ptr<TraceProbe::Sample> TraceProbe::sample(Stream& stream, MicrobatchCell cell, const Tensor& t) {
  auto s = std::make_shared<Sample>();
  s->bytes.resize(t.bytes());
  const std::size_t row = static_cast<std::size_t>(t.shape.cols) * size_of(t.dtype);
  for (std::int64_t r = 0; r < t.shape.rows && !t.contiguous(); ++r) {
    device_.download(stream, s->bytes.data() + static_cast<std::size_t>(r) * row, t.rows(r, 1).data, row);
  }
  if (t.contiguous()) device_.download(stream, s->bytes.data(), t.data, s->bytes.size());
  if (cell != nullptr) device_.download(stream, &s->microbatch, cell, sizeof s->microbatch);
  return s;
}

void TraceProbe::insert(TraceKey key, std::uint64_t digest) {
  const auto [where, is_new] = records_.emplace(std::move(key), digest);
  QE_EXPECTS(is_new, ("recorded twice: " + to_string(where->first)).c_str());
}

void TraceProbe::record(Stream& stream, ProbeCategory category, const std::string& name, MicrobatchCell cell,
                        const Tensor& t) {
  auto s = sample(stream, cell, t);
  const bool one_cell = category == ProbeCategory::kLoss;  // the other cells are of other microbatches
  device_.host_call(stream, [this, s, one_cell, category = std::string(name_of(category)), name] {
    const unsigned char* data = s->bytes.data();
    std::size_t size = s->bytes.size();
    if (one_cell) {
      size = sizeof(float);
      data += static_cast<std::size_t>(s->microbatch) * size;
    }
    insert({step_, category, name, s->microbatch}, XXH3_64bits(data, size));
  });
}

void TraceProbe::record_tensor(Stream& stream, const std::string& category, const std::string& name, const Tensor& t) {
  auto s = sample(stream, nullptr, t);
  device_.synchronize(stream);
  insert({step_, category, name, -1}, XXH3_64bits(s->bytes.data(), s->bytes.size()));
}

void TraceProbe::record_state(Stream& stream, const std::vector<StateEntry>& entries) {
  for (const StateEntry& e : entries) {
    const std::vector<unsigned char> bytes = read_entry(device_, stream, e);
    insert({step_, "state", e.name, -1}, XXH3_64bits(bytes.data(), bytes.size()));
  }
}

void TraceProbe::record_value(const std::string& category, const std::string& name, std::uint64_t value) {
  insert({step_, category, name, -1}, value);
}

}  // namespace qe
