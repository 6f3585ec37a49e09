#include "core/runtime/step_timeline.h"

namespace qe {

void StepTimeline::begin_step(Stream& stream) {
  used_ = 0;
  if (!watching_) return;
  if (!start_) start_ = device_.make_timed_event();
  device_.record(*start_, stream);
}

void StepTimeline::Span::begin(const char* lane, std::string name) {
  index_ = timeline_->used_++;
  auto& records = timeline_->records_;
  Device& device = timeline_->device_;
  if (index_ == records.size()) records.push_back({{}, {}, device.make_timed_event(), device.make_timed_event()});
  records[index_].lane = lane;
  records[index_].name = std::move(name);
  device.record(*records[index_].begin, stream_);
}

StepTimeline::Span::~Span() {
  if (timeline_ != nullptr) timeline_->device_.record(*timeline_->records_[index_].end, stream_);
}

std::vector<StepTimeline::Piece> StepTimeline::pieces() const {
  std::vector<Piece> all;
  for (std::size_t i = 0; i < used_; ++i) {
    const Record& r = records_[i];
    all.push_back({r.lane, r.name, device_.elapsed_ms(*start_, *r.begin), device_.elapsed_ms(*start_, *r.end)});
  }
  return all;
}

}  // namespace qe
