// Arrays of token ids on disk: uint8 ... int64, as Megatron, llm.c and plain bytes have them.
#pragma once

#include <vector>

#include "data/document_index.h"

/// Tokens [first, first + count) of an array that starts at byte `offset` of `file`. `buffer` is reused memory.
void read_binary_tokens(const InputFile& file, int64_t offset, Encoding encoding, int64_t first, int64_t count,
                        std::vector<char>& buffer, int64_t* out);

/// Calls visit(first, tokens, count) over all `num_tokens` tokens of the array, block by block.
void for_each_token_block(const InputFile& file, int64_t offset, Encoding encoding, int64_t num_tokens,
                          const DataProgress& progress,
                          const std::function<void(int64_t, const int64_t*, int64_t)>& visit);
