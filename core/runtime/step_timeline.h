// When each piece of a rank's step ran on its stream, in the device's time. Recording takes two timed events a piece,
// so a step is watched only when somebody asked; the bytes that it computes stay the same.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"

namespace qe {

class StepTimeline {
 public:
  explicit StepTimeline(Device& device) : device_(device) {}

  void watch(bool on) noexcept { watching_ = on; }

  // Forgets the last step; the stream's position is time 0 of this one.
  void begin_step(Stream&);

  // From making to destruction: what is enqueued on the stream meanwhile. Waits that were enqueued before do not count.
  class Span {
   public:
    // `name()` makes the text, and is not called when nobody watches (or the timeline is null): steps are hot.
    template <class Name>
    Span(StepTimeline* timeline, Stream& stream, const char* lane, const Name& name)
        : timeline_(timeline != nullptr && timeline->watching_ ? timeline : nullptr), stream_(stream) {
      if (timeline_ != nullptr) begin(lane, name());
    }
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    void begin(const char* lane, std::string name);

    StepTimeline* timeline_;
    Stream& stream_;
    std::size_t index_ = 0;
  };

  struct Piece {
    std::string lane;  // "compute", "send", "receive", "reduce", "optimizer"
    std::string name;  // "0F1", "refresh 2"
    double begin_ms = 0, end_ms = 0;
  };
  // Of the step, in the order of issue. The host must have waited for its work.
  [[nodiscard]] std::vector<Piece> pieces() const;

 private:
  struct Record {
    std::string lane, name;
    std::unique_ptr<Event> begin, end;
  };
  Device& device_;
  bool watching_ = false;
  std::unique_ptr<Event> start_;
  std::vector<Record> records_;  // events are kept for the next step
  std::size_t used_ = 0;
};

}  // namespace qe
