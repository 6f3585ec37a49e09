// Barriers and exchanges of texts between hosts, over a wire. For transports whose messages go another way.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/wire/host_wait.h"
#include "kernels/wire/wire.h"

namespace qe {

class ControlPlane {
 public:
  ControlPlane(std::shared_ptr<Wire>, RankLayout);

  // Both are collective over the group and block. `wait` holds the deadline.
  void barrier(Group, const HostWait& wait);
  std::vector<std::string> exchange(const std::string& mine, Group, const HostWait& wait);  // in rank order

 private:
  // all[i] has the size of rank i's text when called and holds the text on return.
  void gather(std::string_view mine, std::vector<std::string>& all, Group, const char* name, const HostWait& wait);

  std::shared_ptr<Wire> wire_;
  RankLayout layout_;
  std::array<std::uint64_t, 3> next_{};  // sequence number, per group
};

}  // namespace qe
