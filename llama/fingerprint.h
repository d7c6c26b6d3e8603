// What all ranks of a run must have in common, as short texts to be compared (comm/host_ranks.h, check_same): ranks on
// several hosts may find other files under the same names.
#pragma once

#include <string>

#include "data/loader.h"
#include "data/safetensors.h"

/// Of the bytes of this program.
std::string program_fingerprint();

/// Counts of everything that was found, and the tokens and targets of rows from all over the first epoch.
std::string fingerprint(Loader& loader);

/// Names, dtypes and shapes of all tensors, and elements from the beginning, the middle and the end of each.
std::string fingerprint(const SafetensorsDirectory& weights);
