// The folder that a run writes to: made, held by a lock against a second run, and cleared of what would mislead.
#pragma once

#include <string>

#include "app/config.h"

namespace qe {

class RunDirectory {
 public:
  // report.dir, or a fresh runs/<name>-<time>; made, with the resolved config.json inside. Files of an earlier run in a
  // named directory are replaced. Throws ConfigError when it cannot be made, or another run is writing to it.
  explicit RunDirectory(const Config& config);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  void lock();

  std::string path_;
  int lock_ = -1;  // a descriptor; the system gives the lock back when the process ends, however it ends
};

// Puts a whole file in place by a rename. Throws Error when it cannot.
void replace_file(const std::string& path, const std::string& text);

}  // namespace qe
