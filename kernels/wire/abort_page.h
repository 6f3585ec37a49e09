// One word of memory that all ranks of a host share: which of them failed. A rank that leaves by an exception raises
// it, so that the others stop waiting at once.
#pragma once

#include <string>

#include "kernels/wire/control_plane.h"

namespace qe {

class AbortPage {
 public:
  // Collective over the world. ConfigError when ranks are on several hosts, DeviceError without shared memory.
  AbortPage(ControlPlane&, const RankLayout&, const HostWait&);
  ~AbortPage();
  AbortPage(const AbortPage&) = delete;
  AbortPage& operator=(const AbortPage&) = delete;

  void raise() noexcept;  // the first to fail stays
  [[nodiscard]] bool raised() const noexcept;
  void expect_no_failure() const;  // DeviceError naming the rank that failed, unless it is this one

 private:
  struct Word;
  int rank_;
  Word* word_ = nullptr;
};

}  // namespace qe
