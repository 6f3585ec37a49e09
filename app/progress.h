// What the terminal sees: a line a step on standard output, and below it, when standard error is a terminal, a line
// that rewrites itself with the time left. Files belong to report.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "app/card_peaks.h"
#include "app/config.h"
#include "app/line_sink.h"
#include "app/report.h"

namespace qe {

// "step    12/100 | loss 3.1416 | norm 1.2345 | lr 3.00e-04 | 12.34 ms | 20751 tok/s | 0.123 TFLOP/s"; the rates are of
// the whole job. With the peaks of a rank's card also " (12.3 % of BF16 dense, 6.2 % of FP8)"; a skipped step says so.
std::string step_line(const StepRecord& record, const Config& config, const std::optional<CardPeaks>& peaks);
std::string eval_line(const EvalRecord& record, const Config& config);
// "[#####-----]  50.0%  1:02:03 left"
std::string progress_line(std::int64_t step, std::int64_t train_iters, double ms_per_step);

class Progress {
 public:
  Progress(const Config& config, const std::optional<CardPeaks>& peaks);
  void step(const StepRecord& record);
  void eval(const EvalRecord& record);
  void note(const std::string& line);
  void finish();  // takes the progress line away

 private:
  void print(const std::string& line);
  void erase();

  LineSink out_;
  const Config& config_;
  std::optional<CardPeaks> peaks_;
  bool terminal_;
  std::string shown_;
  double ms_per_step_ = 0;  // of the recent steps
};

}  // namespace qe
