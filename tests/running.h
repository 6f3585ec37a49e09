// A command that a test looks at while it runs: its output line by line, its processes, how it ended.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"

struct Outcome {
  int code = -1;     // -1: killed by a signal
  std::string text;  // standard output and error together
};

class Running {
 public:
  explicit Running(const std::string& command) {
    std::array<int, 2> ends{};
    REQUIRE(::pipe2(ends.data(), O_CLOEXEC) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
      const std::string line = "exec " + command;
      ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    from_ = ::fdopen(ends[0], "r");
  }
  ~Running() {
    if (from_ != nullptr) finish();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  // The processes that it started: under mpirun the ranks, in order.
  [[nodiscard]] std::vector<pid_t> children() const {
    const std::string id = std::to_string(pid_);
    std::vector<pid_t> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + id + "/task")) {
      std::ifstream list(task.path() / "children");
      for (pid_t child = 0; list >> child;) found.push_back(child);
    }
    return found;
  }
  // Reads until a line holds `part`; false when the output ends before.
  bool reads(const std::string& part) {
    std::array<char, 4096> line{};
    while (std::fgets(line.data(), line.size(), from_) != nullptr) {
      out_.text += line.data();
      if (std::string(line.data()).find(part) != std::string::npos) return true;
    }
    return false;
  }
  Outcome finish() {
    reads("\n\n\n");  // no line holds that: to the end
    std::fclose(std::exchange(from_, nullptr));
    int status = 0;
    ::waitpid(pid_, &status, 0);
    out_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return out_;
  }

 private:
  pid_t pid_ = 0;
  std::FILE* from_ = nullptr;
  Outcome out_;
};

inline Outcome run(const std::string& command) { return Running(command).finish(); }

inline int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}
