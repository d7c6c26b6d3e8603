// llm.c token files: a header of 1 KiB and one stream of tokens. FORMAT.md has the layout.
#pragma once

#include "data/document_index.h"

/// Whether the file begins like one.
bool is_llmc(const InputFile& file);

/// Adds the documents of the stream: each begins with the end-of-text token (GPT-2) or begin-of-text token (Llama 3).
void index_llmc(const InputFile& file, IndexWriter& writer, const DataProgress& progress);
