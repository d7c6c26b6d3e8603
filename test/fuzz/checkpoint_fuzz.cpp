// Fuzzes what a checkpoint directory says of itself: the input is trainer_state.json and the index of the shards. It is
// opened, or an Error.
#include <fstream>

#include "data/safetensors.h"
#include "llama/checkpoint_dir.h"
#include "test/fuzz/scratch_directory.h"

namespace {

namespace fs = std::filesystem;

/// A directory with one shard, a.safetensors, that holds tensor "w"; it goes away with the process.
struct CheckpointDirectory {
  fs::path path = scratch_directory("checkpoint");

  CheckpointDirectory() {
    fs::create_directories(path);
    SafetensorsWriter writer(path / "a.safetensors", {{"w", DType::F32, {1}}});
    const float zero = 0;
    writer.write("w", 0, 1, DType::F32, &zero);
    writer.finish();
  }
  ~CheckpointDirectory() { fs::remove_all(path); }
};

template <class Open>
void open_or_error(Open&& open) {
  try {
    open();
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const CheckpointDirectory directory;
  for (const char* name : {"trainer_state.json", "model.safetensors.index.json"}) {
    std::ofstream(directory.path / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  }
  open_or_error([] { open_checkpoint(directory.path); });
  open_or_error([] { SafetensorsDirectory(directory.path).names(); });
  return 0;
}
