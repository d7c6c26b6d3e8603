// The Megatron-LM reader. Contract: megatron.h; layout: FORMAT.md.
#include "data/megatron.h"

#include <algorithm>
#include <cstring>

#include "data/binary_tokens.h"

namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr int64_t kMaxCount = int64_t{1} << 48;  // so that no size below overflows

struct IdxHeader {
  Encoding encoding = Encoding::I32;
  int64_t num_sequences = 0;
  int64_t num_boundaries = 0;  // documents + 1

  int64_t lengths_at() const { return kHeaderBytes; }
  int64_t pointers_at() const { return lengths_at() + 4 * num_sequences; }
  int64_t boundaries_at() const { return pointers_at() + 8 * num_sequences; }
  int64_t size_bytes() const { return boundaries_at() + 8 * num_boundaries; }
};

Encoding encoding_of_code(int code, const std::string& name) {
  switch (code) {
    case 1:
      return Encoding::U8;
    case 2:
      return Encoding::I8;
    case 3:
      return Encoding::I16;
    case 4:
      return Encoding::I32;
    case 5:
      return Encoding::I64;
    case 8:
      return Encoding::U16;
    default:
      fail("{}: dtype code {} is not one of integer tokens (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16)",
           name, code);
  }
}

IdxHeader read_header(const InputFile& idx) {
  const std::string name = idx.path().string();
  CHECK(idx.size_bytes() >= kHeaderBytes, "{}: {} bytes, but the header of a Megatron index has {}; is it truncated?",
        name, idx.size_bytes(), kHeaderBytes);
  char bytes[kHeaderBytes];
  idx.read(0, kHeaderBytes, bytes);
  CHECK(std::memcmp(bytes, kMagic, sizeof(kMagic)) == 0,
        "{}: does not begin with MMIDIDX: this is not the index of a Megatron-LM dataset", name);
  uint64_t version, num_sequences, num_boundaries;
  std::memcpy(&version, bytes + 9, 8);
  std::memcpy(&num_sequences, bytes + 18, 8);
  std::memcpy(&num_boundaries, bytes + 26, 8);
  CHECK(version == 1, "{}: version {} of the Megatron index is not supported, only 1", name, version);
  const Encoding encoding = encoding_of_code(static_cast<unsigned char>(bytes[17]), name);
  CHECK(num_sequences <= kMaxCount && num_boundaries <= kMaxCount,
        "{}: it claims {} sequences and {} document boundaries; it is damaged", name, num_sequences, num_boundaries);

  const IdxHeader header{encoding, static_cast<int64_t>(num_sequences), static_cast<int64_t>(num_boundaries)};
  CHECK(num_sequences == 0 || idx.size_bytes() != header.size_bytes() + header.num_sequences,
        "{}: has a mode for every sequence: multimodal Megatron datasets are not supported", name);
  CHECK(idx.size_bytes() == header.size_bytes(),
        "{}: {} bytes, but {} sequences and {} document boundaries need {}; is it truncated? copy it again", name,
        idx.size_bytes(), num_sequences, num_boundaries, header.size_bytes());
  CHECK(header.num_boundaries > 0, "{}: has no document boundaries; it is damaged", name);
  return header;
}

// Reads the three arrays of the index in step.
class DocumentReader {
 public:
  DocumentReader(const InputFile& idx, const InputFile& bin, const IdxHeader& header)
      : name_(idx.path().string()),
        bin_(bin),
        header_(header),
        lengths_(idx, header.lengths_at(), header.num_sequences),
        pointers_(idx, header.pointers_at(), header.num_sequences),
        boundaries_(idx, header.boundaries_at(), header.num_boundaries) {
    const int64_t first = boundaries_.next();
    CHECK(first == 0, "{}: the first document begins at sequence {}, not 0; it is damaged", name_, first);
  }

  DocumentEntry next(int64_t document) {
    const int64_t end = boundaries_.next();
    CHECK(end >= sequence_ && end <= header_.num_sequences,
          "{}: document {} is sequences {} to {} of {}; the index is damaged", name_, document, sequence_, end,
          header_.num_sequences);
    const int64_t width = bytes_per_token(header_.encoding);
    DocumentEntry entry;
    for (; sequence_ < end; sequence_++) {
      const int64_t length = lengths_.next(), pointer = pointers_.next();
      CHECK(length >= 0 && pointer >= 0 && pointer <= bin_.size_bytes() &&
                length <= (bin_.size_bytes() - pointer) / width,
            "{}: sequence {} has {} tokens of {} bytes from byte {}, but {} has {} bytes; is it truncated? copy it "
            "again",
            name_, sequence_, length, width, pointer, bin_.path().string(), bin_.size_bytes());
      CHECK(pointer % width == 0, "{}: sequence {} begins at byte {}, inside a token of {} bytes; the index is damaged",
            name_, sequence_, pointer, width);
      if (length == 0) continue;
      CHECK(entry.num_tokens == 0 || pointer == entry.offset + entry.size_bytes,
            "{}: document {} is scattered: sequence {} begins at byte {} and not at {}, where the one before ends; "
            "write the dataset again",
            name_, document, sequence_, pointer, entry.offset + entry.size_bytes);
      if (entry.num_tokens == 0) entry.offset = pointer;
      entry.num_tokens += length;
      entry.size_bytes += length * width;
      described_bytes_ += length * width;
    }
    return unmasked_document(entry.offset, entry.size_bytes, entry.num_tokens);
  }

  void check_end() const {
    CHECK(sequence_ == header_.num_sequences,
          "{}: the documents end at sequence {} of {}; the dataset was not finalized: end each document when writing",
          name_, sequence_, header_.num_sequences);
    CHECK(described_bytes_ == bin_.size_bytes(),
          "{}: describes {} bytes, but {} has {}; the two do not belong together", name_, described_bytes_,
          bin_.path().string(), bin_.size_bytes());
  }

 private:
  std::string name_;
  const InputFile& bin_;
  IdxHeader header_;
  ArrayReader<int32_t> lengths_;
  ArrayReader<int64_t> pointers_, boundaries_;
  int64_t sequence_ = 0, described_bytes_ = 0;
};

}  // namespace

void index_megatron(const InputFile& idx, const InputFile& bin, IndexWriter& writer, const DataProgress& progress) {
  const IdxHeader header = read_header(idx);
  writer.stats.encoding = header.encoding;
  DocumentReader reader(idx, bin, header);
  for (int64_t document = 0; document + 1 < header.num_boundaries; document++) {
    const DocumentEntry entry = reader.next(document);
    entry.num_tokens > 0 ? writer.add(entry) : writer.add_empty();
  }
  reader.check_end();
  const int64_t num_tokens = bin.size_bytes() / bytes_per_token(header.encoding);
  for_each_token_block(bin, 0, header.encoding, num_tokens, progress, [&](int64_t, const int64_t* tokens, int64_t n) {
    const auto [lowest, highest] = std::minmax_element(tokens, tokens + n);
    writer.stats.include_tokens(*lowest, *highest);
  });
}
