#include "kernels/wire/abort_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "core/error.h"

namespace qe {

struct AbortPage::Word {
  std::atomic<int> failed;  // 0: none, else world rank + 1
};
static_assert(std::atomic<int>::is_always_lock_free, "processes share it");

namespace {

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

// Unique on the host: no two processes share a number, and no process makes two pages in one nanosecond.
std::string fresh_name() {
  return "/qeffect-" + std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::steady_clock::now().time_since_epoch().count());
}

void* map_page(const std::string& name, int flags, std::size_t bytes) {
  const int file = ::shm_open(name.c_str(), flags, 0600);
  if (file < 0) return MAP_FAILED;
  void* page = MAP_FAILED;
  if ((flags & O_CREAT) == 0 || ::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  ::close(file);
  return page;
}

}  // namespace

AbortPage::AbortPage(ControlPlane& control, const RankLayout& layout, const HostWait& wait) : rank_(layout.world) {
  const bool leads = layout.world == 0;
  std::string name = leads ? fresh_name() : "";
  void* page = leads ? map_page(name, O_CREAT | O_EXCL | O_RDWR, sizeof(Word)) : MAP_FAILED;
  std::string fault = leads && page == MAP_FAILED ? std::strerror(errno) : "";

  const std::vector<std::string> hosts = control.exchange(host_name(), Group::kWorld, wait);
  const std::vector<std::string> names = control.exchange(name, Group::kWorld, wait);
  if (!leads) {
    page = map_page(names.front(), O_RDWR, sizeof(Word));
    if (page == MAP_FAILED) fault = std::strerror(errno);
  }
  const std::vector<std::string> faults = control.exchange(fault, Group::kWorld, wait);
  if (leads) ::shm_unlink(name.c_str());  // everyone who can has it open
  if (page != MAP_FAILED) word_ = static_cast<Word*>(page);

  for (std::size_t r = 0; r < faults.size(); ++r) {
    if (faults[r].empty()) continue;
    if (page != MAP_FAILED) ::munmap(page, sizeof(Word));
    if (hosts[r] != hosts.front()) {
      throw ConfigError("execution.transport ipc joins the ranks of one host, but rank 0 is on " + hosts.front() +
                        " and rank " + std::to_string(r) + " on " + hosts[r] +
                        "; start all ranks on one host, or use nccl");
    }
    throw DeviceError("rank " + std::to_string(r) + " cannot share memory with the ranks of its host (" + faults[r] +
                      "); make /dev/shm writable");
  }
}

AbortPage::~AbortPage() { ::munmap(word_, sizeof(Word)); }

void AbortPage::raise() noexcept {
  int none = 0;
  word_->failed.compare_exchange_strong(none, rank_ + 1, std::memory_order_acq_rel);
}

bool AbortPage::raised() const noexcept { return word_->failed.load(std::memory_order_acquire) != 0; }

void AbortPage::expect_no_failure() const {
  const int failed = word_->failed.load(std::memory_order_acquire);
  if (failed == 0 || failed == rank_ + 1) return;
  throw DeviceError("rank " + std::to_string(rank_) + " stops because rank " + std::to_string(failed - 1) +
                    " failed; its message says why");
}

}  // namespace qe
