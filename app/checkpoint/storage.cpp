#include "app/checkpoint/storage.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& doing, const std::string& path, const std::string& reason) {
  throw storage_failure(doing, path, reason);
}
[[noreturn]] void fail(const std::string& doing, const std::string& path) { fail(doing, path, std::strerror(errno)); }

CheckpointError unreadable(const std::string& path, const std::string& failure) {
  return CheckpointError(path + " " + failure + "; restore it or use another checkpoint.");
}

class DiskFile final : public OutputFile {
 public:
  explicit DiskFile(const std::string& path)
      : path_(path), descriptor_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) fail("create", path_);
  }
  ~DiskFile() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  void write(Bytes bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::write(descriptor_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("write", path_);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    // The disk begins at once and not in finish(). A file system that cannot is no failure.
    (void)::sync_file_range(descriptor_, 0, 0, SYNC_FILE_RANGE_WRITE);
  }
  void finish() override {
    if (::fsync(descriptor_) != 0) fail("sync", path_);
    const int descriptor = std::exchange(descriptor_, -1);
    if (::close(descriptor) != 0) fail("close", path_);
  }

 private:
  std::string path_;
  int descriptor_;
};

class DiskStorage final : public Storage {
 public:
  void make_directory(const std::string& path) override {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail("make the folder", path, error.message());
  }
  std::unique_ptr<OutputFile> create(const std::string& path) override { return std::make_unique<DiskFile>(path); }
  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail("rename " + from + " to", to);
  }
  void sync_directory(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) fail("open the folder", path);
    const int result = ::fsync(descriptor);
    const int reason = errno;
    ::close(descriptor);
    errno = reason;
    if (result != 0) fail("sync the folder", path);
  }
  void remove(const std::string& path) override {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail("remove", path, error.message());
  }
};

}  // namespace

void Storage::write_file(const std::string& path, const std::string& text) {
  const std::unique_ptr<OutputFile> file = create(path);
  file->write({reinterpret_cast<const unsigned char*>(text.data()), text.size()});
  file->finish();
}

CheckpointError storage_failure(const std::string& doing, const std::string& path, const std::string& reason) {
  return CheckpointError("Cannot " + doing + " " + path + " (" + reason +
                         "); check free space and permissions of that folder.");
}

std::unique_ptr<Storage> make_disk_storage() { return std::make_unique<DiskStorage>(); }

InputFile::InputFile(const std::string& path) : path_(path), file_(path) {
  if (!file_.failure().empty()) throw unreadable(path_, file_.failure());
}

void InputFile::read(std::uint64_t offset, std::span<unsigned char> out) const {
  const auto read = file_.read(offset, out.data(), out.size());
  if (!read) throw unreadable(path_, std::string("cannot be read: ") + std::strerror(errno));
  if (*read != out.size()) throw unreadable(path_, "ends early");
}

std::string read_text_file(const std::string& path) {
  const InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, {reinterpret_cast<unsigned char*>(text.data()), text.size()});
  return text;
}

std::string hex_digest(std::uint64_t digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 0; i < 16; ++i) text[15 - i] = kDigits[digest >> (4 * i) & 15];
  return text;
}

std::string digest_of(Bytes bytes) { return hex_digest(XXH3_64bits(bytes.data(), bytes.size())); }

std::string digest_of_file(const InputFile& file) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::vector<unsigned char> block(std::size_t{1} << 20);
  for (std::uint64_t at = 0; at < file.size();) {
    const std::size_t n = std::min<std::uint64_t>(block.size(), file.size() - at);
    file.read(at, {block.data(), n});
    XXH3_64bits_update(state.get(), block.data(), n);
    at += n;
  }
  return hex_digest(XXH3_64bits_digest(state.get()));
}

}  // namespace qe
