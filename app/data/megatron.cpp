// Megatron indexed datasets: NAME.bin is tokens and nothing else, NAME.idx says how they are stored. Little-endian:
//
//   0  9 bytes "MMIDIDX\0\0"     17  uint8 type of a token        26  uint64 d, documents + 1
//   9  uint64 version, 1         18  uint64 n, sequences          34  int32[n] lengths in tokens
//   then int64[n] where each sequence begins, in bytes; int64[d] the first sequence of each document, and n at the end;
//   in multimodal sets int8[n] modes.
//
// Sequences lie one after the other, so that the .bin is one row of tokens; anything else is refused.
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <vector>

#include "app/data/token_layout.h"
#include "app/regular_file.h"

namespace qe {
namespace {

constexpr char kMagic[] = "MMIDIDX\0";  // and the literal's own zero: nine bytes
constexpr std::uint64_t kMagicBytes = sizeof kMagic;
constexpr std::uint64_t kVersionAt = 9, kTypeAt = 17, kSequencesAt = 18, kDocumentsAt = 26, kHeaderBytes = 34;
constexpr std::uint64_t kVersion = 1;
constexpr std::int64_t kBlock = 1 << 15;  // entries read at a time: an index may be larger than memory
static_assert(kMagicBytes == kVersionAt);

std::string str(std::int64_t v) { return std::to_string(v); }

struct Code {
  int code;
  TokenType type;
};
constexpr Code kCodes[] = {{1, TokenType::kU8},  {2, TokenType::kI8},  {3, TokenType::kI16},
                           {4, TokenType::kI32}, {5, TokenType::kI64}, {8, TokenType::kU16}};

// One index while it is being checked.
class Index {
 public:
  explicit Index(std::string path) : path_(std::move(path)), file_(path_) {
    require_readable(path_, file_);
    if (file_.size() < kHeaderBytes) {
      refuse("has " + str(static_cast<std::int64_t>(file_.size())) + " bytes, wanted the 34 of an index's header.");
    }
    check_magic();
    check_counts();
  }

  // Checks everything that the header has not told.
  TokenLayout layout() {
    TokenLayout layout{0, type(), 0};
    layout.count = check_sequences(size_of(layout.type));
    check_documents();
    check_modes();
    return layout;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { refuse_token_file(path_, what); }

  template <class Value>
  Value value_at(std::uint64_t offset) const {
    Value value{};
    read_exactly(path_, file_, offset, &value, sizeof value);
    return value;
  }
  // Entries of an array, a block at a time: visit(index, value). Nothing in an index is aligned.
  template <class Value, class Visit>
  void for_each(std::uint64_t offset, std::int64_t count, Visit visit) const {
    std::vector<Value> block;
    for (std::int64_t first = 0; first < count; first += kBlock) {
      block.resize(static_cast<std::size_t>(std::min(kBlock, count - first)));
      read_exactly(path_, file_, offset + static_cast<std::uint64_t>(first) * sizeof(Value), block.data(),
                   block.size() * sizeof(Value));
      for (std::size_t i = 0; i < block.size(); ++i) visit(first + static_cast<std::int64_t>(i), block[i]);
    }
  }

  void check_magic() const {
    std::array<char, kMagicBytes> magic{};
    read_exactly(path_, file_, 0, magic.data(), magic.size());
    if (std::memcmp(magic.data(), kMagic, kMagicBytes) != 0) {
      refuse("does not begin with MMIDIDX and two zero bytes; it is no index of a Megatron dataset.");
    }
    const auto version = value_at<std::uint64_t>(kVersionAt);
    if (version == kVersion) return;
    refuse("has version " + std::to_string(version) + ", wanted 1" +
           (version == __builtin_bswap64(kVersion) ? ": it was written on a big-endian machine." : "."));
  }

  // The counts are only believed where the file is exactly as long as they say.
  void check_counts() {
    const auto sequences = value_at<std::uint64_t>(kSequencesAt), documents = value_at<std::uint64_t>(kDocumentsAt);
    const std::uint64_t size = file_.size();
    const auto counts = std::to_string(sequences) + " sequences and " + std::to_string(documents) + " document marks";
    if (sequences > size / 12 || documents > size / 8) {
      refuse("has " + str(static_cast<std::int64_t>(size)) + " bytes, too few for its " + counts +
             "; it is cut short.");
    }
    pointers_at_ = kHeaderBytes + 4 * sequences;
    documents_at_ = pointers_at_ + 8 * sequences;
    modes_at_ = documents_at_ + 8 * documents;
    has_modes_ = sequences > 0 && size == modes_at_ + sequences;
    if (size != modes_at_ && !has_modes_) {
      refuse("has " + str(static_cast<std::int64_t>(size)) + " bytes, wanted " +
             str(static_cast<std::int64_t>(modes_at_)) + " for its " + counts + "; it is " +
             (size < modes_at_ ? "cut short." : "longer than its header says."));
    }
    sequences_ = static_cast<std::int64_t>(sequences);
    documents_ = static_cast<std::int64_t>(documents);
  }

  [[nodiscard]] TokenType type() const {
    const int code = value_at<std::uint8_t>(kTypeAt);
    for (const Code& c : kCodes) {
      if (c.code == code) return c.type;
    }
    refuse("has tokens of type " + std::to_string(code) + (code == 6 || code == 7 ? " (floating point)" : "") +
           ", wanted 1 (uint8), 2 (int8), 3 (int16), 4 (int32), 5 (int64) or 8 (uint16).");
  }

  // Returns the tokens of all sequences.
  [[nodiscard]] std::int64_t check_sequences(int bytes_per_token) const {
    std::vector<std::int64_t> begins;  // of one block of lengths
    std::int64_t tokens = 0;
    for_each<std::int32_t>(kLengthsAt, sequences_, [&](std::int64_t i, std::int32_t length) {
      if (i % kBlock == 0) {
        begins.resize(static_cast<std::size_t>(std::min(kBlock, sequences_ - i)));
        read_exactly(path_, file_, pointers_at_ + 8 * static_cast<std::uint64_t>(i), begins.data(), 8 * begins.size());
      }
      if (length < 0) refuse("has a length of " + str(length) + " for sequence " + str(i) + "; it is damaged.");
      const std::int64_t begin = begins[static_cast<std::size_t>(i % kBlock)], wanted = tokens * bytes_per_token;
      if (begin != wanted) {
        refuse("lets sequence " + str(i) + " begin at byte " + str(begin) + ", wanted " + str(wanted) +
               ", where the one before it ends; join such datasets with Megatron's merge tool.");
      }
      tokens += length;
    });
    return tokens;
  }

  void check_documents() const {
    if (documents_ == 0) refuse("has no document marks, wanted a 0 at least; it is damaged.");
    std::int64_t before = 0;
    for_each<std::int64_t>(documents_at_, documents_, [&](std::int64_t i, std::int64_t first) {
      if (i == 0 && first != 0) refuse("lets document 0 begin at sequence " + str(first) + ", wanted 0.");
      if (first < before) {
        refuse("lets document " + str(i) + " begin at sequence " + str(first) + ", before the one before it at " +
               str(before) + ".");
      }
      before = first;
    });
    if (before == sequences_) return;
    refuse("ends its documents at sequence " + str(before) + ", wanted " + str(sequences_) +
           ", the number of sequences.");
  }

  void check_modes() const {
    if (!has_modes_) return;
    for_each<std::int8_t>(modes_at_, sequences_, [&](std::int64_t i, std::int8_t mode) {
      if (mode != 0) refuse("has mode " + str(mode) + " for sequence " + str(i) + ", wanted 0, text.");
    });
  }

  static constexpr std::uint64_t kLengthsAt = kHeaderBytes;
  std::string path_;
  RegularFile file_;
  std::int64_t sequences_ = 0, documents_ = 0;
  std::uint64_t pointers_at_ = 0, documents_at_ = 0, modes_at_ = 0;
  bool has_modes_ = false;
};

}  // namespace

MegatronPair megatron_pair(const std::string& path) {
  const std::filesystem::path p = path;
  const bool named = p.extension() == ".bin" || p.extension() == ".idx";
  const std::string prefix = named ? path.substr(0, path.size() - 4) : path;
  return {prefix + ".bin", prefix + ".idx"};
}

TokenLayout megatron_layout(const std::string& path, const RegularFile& file) {
  const std::string index_path = megatron_pair(path).index;
  std::error_code error;
  if (!std::filesystem::exists(index_path, error)) {
    refuse_token_file(index_path, "cannot be opened: No such file; it is the index of " + path +
                                      ": copy it there, or set data.format to \"llmc\" for llm.c's shards.");
  }
  const TokenLayout layout = Index(index_path).layout();
  const auto size = static_cast<std::int64_t>(file.size());
  const std::int64_t wanted = layout.count * size_of(layout.type);
  if (size != wanted) {
    refuse_token_file(path, "has " + str(size) + " bytes, wanted " + str(wanted) + " for the " + str(layout.count) +
                                " tokens of " + index_path + "; it is " +
                                (size < wanted ? "cut short." : "longer than its index says."));
  }
  if (layout.count == 0) refuse_token_file(path, "holds no tokens; leave it out.");
  return layout;
}

}  // namespace qe
