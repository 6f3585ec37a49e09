// How checkpoints reach a file system: every call either has its effect or throws CheckpointError with the path and the
// system's reason. Virtual, so that a test can make any one call fail. Knows no formats and no other ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "app/regular_file.h"
#include "core/error.h"

namespace qe {

using Bytes = std::span<const unsigned char>;

// A file being written; dropped without finish() it may hold anything.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void write(Bytes bytes) = 0;
  virtual void finish() = 0;  // everything is on the disk when it returns
};

class Storage {
 public:
  virtual ~Storage() = default;
  virtual void make_directory(const std::string& path) = 0;                 // with its parents; one that exists is fine
  virtual std::unique_ptr<OutputFile> create(const std::string& path) = 0;  // an existing file is emptied
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void sync_directory(const std::string& path) = 0;
  virtual void remove(const std::string& path) = 0;  // a file or a whole folder; one that is not there is fine

  // create, write and finish in one.
  void write_file(const std::string& path, const std::string& text);
};

std::unique_ptr<Storage> make_disk_storage();
// "Cannot <doing> <path> (<reason>)", and what to do.
CheckpointError storage_failure(const std::string& doing, const std::string& path, const std::string& reason);

// A file to read from at any place. Throws CheckpointError.
class InputFile {
 public:
  explicit InputFile(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return file_.size(); }
  void read(std::uint64_t offset, std::span<unsigned char> out) const;

 private:
  std::string path_;
  RegularFile file_;
};

std::string read_text_file(const std::string& path);
// XXH3 (64 bits) of a whole file, and of bytes, as 16 hexadecimal digits.
std::string digest_of_file(const InputFile&);
std::string digest_of(Bytes bytes);
std::string hex_digest(std::uint64_t digest);

}  // namespace qe
