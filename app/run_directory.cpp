#include "app/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace qe {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLockFile = ".lock";

std::string time_stamp() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &parts);
  return text;
}

fs::path make_folder(const Config& config) {
  std::error_code error;
  fs::path dir = config.report.dir;
  if (dir.empty()) {
    const fs::path base = fs::path("runs") / (config.name + "-" + time_stamp());
    fs::create_directories(base.parent_path(), error);
    dir = base;
    for (int i = 2; !error && !fs::create_directory(dir, error); ++i) dir = base.string() + "-" + std::to_string(i);
  } else {
    fs::create_directories(dir, error);
  }
  if (error) {
    throw ConfigError("report.dir: cannot make the folder " + dir.string() + " (" + error.message() +
                      "); name one that can be written.");
  }
  return dir;
}

}  // namespace

RunDirectory::RunDirectory(const Config& config) : path_(make_folder(config).string()) {
  lock();
  std::error_code error;
  fs::remove(fs::path(path_) / "report.json", error);  // an earlier run's would outlive one that fails
  try {
    replace_file((fs::path(path_) / "config.json").string(), dump_config(config));
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

RunDirectory::~RunDirectory() { ::close(lock_); }

void RunDirectory::lock() {
  const std::string file = (fs::path(path_) / kLockFile).string();
  lock_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) {
    throw ConfigError("report.dir: cannot write in " + path_ + " (" +
                      std::error_code(errno, std::generic_category()).message() +
                      "); name a folder that can be written.");
  }
  // A file system without locks refuses with another reason; the run goes on without.
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(lock_);
  throw ConfigError("report.dir: another run is writing to " + path_ + "; wait for its end, or name another folder.");
}

void replace_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  if (file) fs::rename(temporary, path, error);
  if (!file || error) throw Error(ExitCode::kRuntime, "Cannot write " + path + "; check the disk and report.dir.");
}

}  // namespace qe
