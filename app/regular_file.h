// An open regular file to read from. Opening and reading never wait for another process: a FIFO, a device or a folder
// is refused by its kind. Knows no formats; the words of a failure follow a path in the caller's sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace qe {

class RegularFile {
 public:
  explicit RegularFile(const std::string& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;
  RegularFile& operator=(RegularFile&&) = delete;

  // Why the file cannot be read, as "cannot be opened: No such file or directory"; empty: it can.
  [[nodiscard]] const std::string& failure() const noexcept { return failure_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }  // when it was opened
  // Up to `bytes` from `offset`; fewer only at the end of the file. nullopt: the system refused, errno says why.
  [[nodiscard]] std::optional<std::size_t> read(std::uint64_t offset, void* to, std::size_t bytes) const;
  // Everything to the end of the file.
  [[nodiscard]] std::optional<std::string> read_all() const;

 private:
  int descriptor_ = -1;
  std::size_t size_ = 0;
  std::string failure_;
};

}  // namespace qe
