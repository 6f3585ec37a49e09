// Trace: digests of everything that two runs must agree on to the bit (house.md 7, semantics.md 1.11). Keyed by layer
// or parameter, never by rank or stage, so that runs under different cuts and schedules compare as sets.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime/state_dict.h"
#include "core/stage/probe.h"

namespace qe {

struct TraceKey {
  std::uint64_t step;
  std::string category;  // "layer output", "master", …
  std::string name;      // layer or parameter
  int microbatch;        // −1: once a step
  auto operator<=>(const TraceKey&) const = default;
};
using TraceRecords = std::map<TraceKey, std::uint64_t>;  // XXH3 of the bytes, or a counter's value

std::string to_string(const TraceKey&);
// The first keys in which two traces differ or that only one has; empty when equal. At most `limit` lines.
std::vector<std::string> differences(const TraceRecords&, const TraceRecords&, int limit = 10);

class TraceProbe final : public Probe {
 public:
  explicit TraceProbe(Device& device) : device_(device) {}

  void record(Stream&, ProbeCategory, const std::string& name, MicrobatchCell, const Tensor&) override;

  void begin_step(std::uint64_t step) noexcept { step_ = step; }
  // At the step's commit, with nothing in flight: master parameters, moments, scaling state.
  void record_state(Stream&, const std::vector<StateEntry>&);
  // One tensor, read at once.
  void record_tensor(Stream&, const std::string& category, const std::string& name, const Tensor&);
  void record_value(const std::string& category, const std::string& name, std::uint64_t value);

  [[nodiscard]] const TraceRecords& records() const noexcept { return records_; }

 private:
  struct Sample;  // host memory that a captured download writes again in every replay
  std::shared_ptr<Sample> sample(Stream&, MicrobatchCell, const Tensor&);
  void insert(TraceKey, std::uint64_t digest);

  Device& device_;
  std::uint64_t step_ = 0;
  TraceRecords records_;
};

}  // namespace qe
