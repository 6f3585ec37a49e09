// The host waits for another rank: until it is there, the deadline has passed, or a rank has failed.
#pragma once

#include <functional>
#include <string>

namespace qe {

class HostWait {
 public:
  // `expect_no_failure` throws DeviceError when another rank has failed; may be empty.
  HostWait(int rank, double timeout_s, std::function<void()> expect_no_failure = {});

  // Polls. DeviceError on expiry: this rank, what() it waits for, since when.
  void until(const std::function<bool()>& done, const std::function<std::string()>& what) const;

 private:
  int rank_;
  double timeout_s_;
  std::function<void()> expect_no_failure_;
};

}  // namespace qe
