#include "app/data/token_file.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "core/error.h"

namespace qe {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

constexpr std::int64_t kScanBlock = 1 << 18;  // tokens read at a time by the check of all of them
constexpr const char* kSetVocabulary = "; set model.vocab_size to the tokenizer's.";
constexpr const char* kChanged = "; the file has changed since the run began.";
constexpr std::uint32_t kNoId =
    0xFFFFFFFF;  // stands for a negative id, or one of more than 32 bits: never a vocabulary's

std::string str(std::int64_t v) { return std::to_string(v); }

// Calls visit with a value of the type that a file's tokens have.
template <class Visit>
auto with_type(TokenType type, Visit visit) {
  switch (type) {
    case TokenType::kU8:
      return visit(std::uint8_t{});
    case TokenType::kI8:
      return visit(std::int8_t{});
    case TokenType::kU16:
      return visit(std::uint16_t{});
    case TokenType::kI16:
      return visit(std::int16_t{});
    case TokenType::kI32:
      return visit(std::int32_t{});
    case TokenType::kI64:
      return visit(std::int64_t{});
    case TokenType::kU32:
      break;
  }
  return visit(std::uint32_t{});
}

// `raw` may be the upper end of `out`: each token is read before a write reaches it.
template <class Token>
void widen(const unsigned char* raw, std::span<std::int32_t> out) {
  for (std::int32_t& to : out) {
    Token token{};
    std::memcpy(&token, raw, sizeof token);
    raw += sizeof token;
    const auto id = static_cast<std::int64_t>(token);
    to = static_cast<std::int32_t>(id < 0 || id > kNoId ? kNoId : static_cast<std::uint32_t>(id));
  }
}

// A loop without an early end, so that it vectorises.
std::uint32_t largest_of(std::span<const std::uint32_t> ids) {
  std::uint32_t largest = 0;
  for (const std::uint32_t id : ids) largest = std::max(largest, id);
  return largest;
}

}  // namespace

int size_of(TokenType type) noexcept {
  return with_type(type, [](auto token) { return static_cast<int>(sizeof token); });
}

void refuse_token_file(const std::string& path, const std::string& what) {
  throw DataError("Token file " + path + " " + what);
}

void require_readable(const std::string& path, const RegularFile& file) {
  const std::string& failure = file.failure();
  if (failure.starts_with("is a directory")) {
    refuse_token_file(path, failure + "; name its files, as in " + path + "/*.bin.");
  }
  if (failure.starts_with("is not a regular")) refuse_token_file(path, failure + "; copy what it gives to one.");
  if (!failure.empty()) refuse_token_file(path, failure + ".");
}

void read_exactly(const std::string& path, const RegularFile& file, std::uint64_t offset, void* to, std::size_t bytes) {
  const auto done = file.read(offset, to, bytes);
  if (!done) refuse_token_file(path, std::string("cannot be read: ") + std::strerror(errno) + ".");
  if (*done == bytes) return;
  refuse_token_file(path, "ends at byte " + str(static_cast<std::int64_t>(offset + *done)) +
                              " while it is being read; leave it alone and start again.");
}

TokenFile::TokenFile(const std::string& path, int vocab_size, DataFormat format)
    : path_(path), file_(path), vocab_size_(static_cast<std::uint32_t>(vocab_size)) {
  require_readable(path_, file_);
  layout_ = format == DataFormat::kMegatron ? megatron_layout(path_, file_) : llmc_layout(path_, file_);
  std::vector<std::int32_t> block(static_cast<std::size_t>(std::min(kScanBlock, size())));
  for (std::int64_t first = 0; first < size(); first += kScanBlock) {
    const auto n = static_cast<std::size_t>(std::min(kScanBlock, size() - first));
    read_tokens(first, std::span(block).first(n), kSetVocabulary);
  }
}

std::uint64_t TokenFile::byte_of(std::int64_t token) const noexcept {
  return layout_.offset + static_cast<std::uint64_t>(token * size_of(layout_.type));
}

void TokenFile::refuse_id(std::int64_t at, const char* advice) const {
  const std::string id = with_type(layout_.type, [&](auto token) {
    read_exactly(path_, file_, byte_of(at), &token, sizeof token);
    return std::to_string(token);
  });
  refuse_token_file(path_, "has id " + id + " at token " + str(at) + " (byte " + std::to_string(byte_of(at)) +
                               "), wanted ids " + (id.starts_with('-') ? "from 0 and " : "") +
                               "below model.vocab_size " + str(vocab_size_) + advice);
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const { read_tokens(first, out, kChanged); }

void TokenFile::read_tokens(std::int64_t first, std::span<std::int32_t> out, const char* advice) const {
  QE_EXPECTS(first >= 0 && first + std::ssize(out) <= size(), "a read stays inside its token file");
  // Tokens of up to four bytes are read into the upper end of `out` and widened from there, from the lowest on.
  const std::size_t bytes = out.size() * static_cast<std::size_t>(size_of(layout_.type));
  std::vector<unsigned char> wider(bytes > out.size_bytes() ? bytes : 0);
  auto* raw = wider.empty() ? reinterpret_cast<unsigned char*>(out.data()) + (out.size_bytes() - bytes) : wider.data();
  const std::uint64_t offset = byte_of(first);
  const auto done = file_.read(offset, raw, bytes);
  if (!done) refuse_token_file(path_, std::string("cannot be read: ") + std::strerror(errno) + ".");
  if (*done < bytes) {
    refuse_token_file(path_, "ends at byte " + str(static_cast<std::int64_t>(offset + *done)) + ", wanted the tokens " +
                                 str(first) + " to " + str(first + std::ssize(out) - 1) + kChanged);
  }
  if (layout_.type != TokenType::kU32) {
    with_type(layout_.type, [&](auto token) { widen<decltype(token)>(raw, out); });
  }
  const std::span ids(reinterpret_cast<const std::uint32_t*>(out.data()), out.size());
  if (largest_of(ids) < vocab_size_) return;
  const auto bad = std::find_if(ids.begin(), ids.end(), [this](std::uint32_t id) { return id >= vocab_size_; });
  refuse_id(first + (bad - ids.begin()), advice);
}

}  // namespace qe
