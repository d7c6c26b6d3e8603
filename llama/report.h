// What is said before training starts: the run, the model, the data, the memory.
#pragma once

#include "data/loader.h"
#include "data/safetensors.h"
#include "layers/core/log.h"
#include "llama/plan.h"

void report_model(Console& console, const ModelConfig& model, const std::vector<ParamUnit>& units);
/// What a pretrained checkpoint holds that is not saved as it came.
void report_weights(Console& console, const ModelConfig& model, const SafetensorsDirectory& weights);
/// Shows a bar for each file that a loader indexes.
DataProgress report_data_progress(Console& console);
void report_data(Console& console, const char* what, const DataSummary& summary);

/// What differs between the run that saved a checkpoint and the one that goes on from it, a line an option.
void report_changes(Console& console, const nlohmann::json& saved, const nlohmann::json& now);

/// Rows, tokens and steps of the run.
void report_steps(Console& console, const RunConfig& run, const MeshShape& mesh, Loader& train, int64_t total_steps,
                  int64_t total_rows);

/// Nothing on one rank.
void report_traffic(Console& console, const Traffic& traffic, const MeshShape& mesh);

void report_memory(Console& console, const std::vector<MemoryChoice>& choices);
