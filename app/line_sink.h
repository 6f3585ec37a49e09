// Lines for whoever reads a descriptor, without ever waiting for him: a terminal that is held, a pager, or a launcher
// that is busy ending the job must not stop a rank between two steps.
#pragma once

#include <cstddef>
#include <string>

namespace qe {

class LineSink {
 public:
  // The descriptor stays the caller's. Its own flags are left alone, because other processes share them.
  explicit LineSink(int descriptor);
  ~LineSink();  // gives the reader a second for what is left
  LineSink(const LineSink&) = delete;
  LineSink& operator=(const LineSink&) = delete;

  // Written before it returns if the reader keeps up, else kept for the next call. When more than a mebibyte is kept
  // the line is left out, and how many were stands in their place. An error of the descriptor is nobody's.
  void write(const std::string& line);

 private:
  void flush();

  int own_;         // does not block; -1: none could be had
  int descriptor_;  // what is written to
  std::string kept_;
  std::size_t left_out_ = 0;
};

}  // namespace qe
