#include "kernels/wire/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace qe {
namespace {

struct ProcessStat {
  char state = 'X';
  int parent = 0;
  unsigned long long born = 0;
};

// Fields of /proc/<pid>/stat after the name, which may hold anything and ends at the last parenthesis.
std::optional<ProcessStat> stat_of(int pid) noexcept {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  const ssize_t n = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (n <= 0) return std::nullopt;
  text[n] = '\0';
  const char* fields = std::strrchr(text, ')');
  ProcessStat s;
  constexpr char kFormat[] = ") %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
  if (fields == nullptr || std::sscanf(fields, kFormat, &s.state, &s.parent, &s.born) != 3) return std::nullopt;
  return s;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::optional<std::uint64_t> birth_of(int pid) noexcept {
  const auto s = stat_of(pid);
  if (!s || s->state == 'Z' || s->state == 'X') return std::nullopt;
  return s->born;
}

int parent_of(int pid) noexcept {
  const auto s = stat_of(pid);
  return s ? s->parent : 0;
}

}  // namespace qe
