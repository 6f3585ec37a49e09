#include "app/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace qe {
namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  char text[512];
  va_list args;
  va_start(args, pattern);
  const int length = std::vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  return {text, static_cast<std::size_t>(std::clamp(length, 0, static_cast<int>(sizeof text) - 1))};
}

std::string place(std::int64_t step, const Config& c) {
  return format("step %6lld/%lld", static_cast<long long>(step), static_cast<long long>(c.training.train_iters));
}

// printf shows the sign of a NaN, which says nothing.
double without_sign_of_nan(double v) { return std::isnan(v) ? std::abs(v) : v; }

}  // namespace

std::string step_line(const StepRecord& r, const Config& c, const std::optional<CardPeaks>& peaks) {
  const double tokens_per_second = r.ms > 0 ? static_cast<double>(c.tokens_per_step()) * 1000 / r.ms : 0;
  const double tflops =
      tokens_per_second * static_cast<double>(flops_per_token(c.model, c.training.seq_length)) * 1e-12;
  const bool finite = std::isfinite(r.loss) && std::isfinite(r.grad_norm);
  const char* verdict = r.skipped ? " | skipped" : finite ? "" : " | not finite";
  const double percent = 100 * tflops / c.ranks();
  const std::string share =
      peaks ? format(" (%.1f %% of BF16 dense, %.1f %% of FP8)", percent / peaks->bf16, percent / peaks->fp8) : "";
  return place(r.step, c) + format(" | loss %.4f | norm %.4f | lr %.2e | %.2f ms | %.0f tok/s | %.3f TFLOP/s%s%s",
                                   without_sign_of_nan(r.loss), without_sign_of_nan(r.grad_norm), r.lr, r.ms,
                                   tokens_per_second, tflops, share.c_str(), verdict);
}

std::string eval_line(const EvalRecord& r, const Config& c) {
  return place(r.step, c) + format(" | valid loss %.4f over %lld tokens | %.2f ms", without_sign_of_nan(r.valid_loss),
                                   static_cast<long long>(r.target_tokens), r.ms);
}

std::string progress_line(std::int64_t step, std::int64_t train_iters, double ms_per_step) {
  constexpr int kWidth = 20;
  const double done = train_iters > 0 ? static_cast<double>(step) / static_cast<double>(train_iters) : 1;
  const int filled = static_cast<int>(done * kWidth);
  const auto left = std::llround(static_cast<double>(train_iters - step) * ms_per_step / 1000);
  return "[" + std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kWidth - filled), '-') +
         format("] %5.1f%%  %lld:%02lld:%02lld left", 100 * done, left / 3600, left / 60 % 60, left % 60);
}

Progress::Progress(const Config& config, const std::optional<CardPeaks>& peaks)
    : out_(STDOUT_FILENO), config_(config), peaks_(peaks), terminal_(::isatty(STDERR_FILENO) == 1) {}

void Progress::step(const StepRecord& r) {
  ms_per_step_ = ms_per_step_ == 0 ? r.ms : 0.9 * ms_per_step_ + 0.1 * r.ms;
  if (terminal_) shown_ = progress_line(r.step, config_.training.train_iters, ms_per_step_);
  print(step_line(r, config_, peaks_));
}

void Progress::eval(const EvalRecord& r) { print(eval_line(r, config_)); }
void Progress::note(const std::string& line) { print(line); }

void Progress::finish() {
  erase();
  shown_.clear();
}

void Progress::print(const std::string& line) {
  erase();
  out_.write(line);
  if (!shown_.empty()) std::fprintf(stderr, "%s", shown_.c_str());
}

void Progress::erase() {
  if (!shown_.empty()) std::fprintf(stderr, "\r\033[K");
}

}  // namespace qe
