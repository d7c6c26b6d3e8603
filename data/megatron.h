// Megatron-LM indexed datasets: `x.bin` holds the tokens, `x.idx` where they lie. FORMAT.md has the layout.
#pragma once

#include "data/document_index.h"

/// Checks both files against each other and adds every document: the sequences that belong to it, one after another.
void index_megatron(const InputFile& idx, const InputFile& bin, IndexWriter& writer, const DataProgress& progress);
