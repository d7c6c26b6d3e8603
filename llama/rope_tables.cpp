// make_rope_table: inverse frequencies in the order of operations, and in the fp32, of transformers' rope utilities, so
// that positions of 10^5 and more turn by the same angle. w_m = theta^(-2m/r), m = 0 .. r/2 - 1.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "layers/core/check.h"
#include "llama/config.h"

double yarn_temperature(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

namespace {

/// theta^(2m/r): the exponent and the result are rounded to fp32, the power itself is not.
std::vector<float> powers(double theta, int64_t r) {
  std::vector<float> p(static_cast<size_t>(r / 2));
  for (size_t m = 0; m < p.size(); m++) {
    const float exponent = static_cast<float>(2 * m) / static_cast<float>(r);
    p[m] = static_cast<float>(std::pow(static_cast<double>(static_cast<float>(theta)), static_cast<double>(exponent)));
  }
  return p;
}

std::vector<float> inverse(std::vector<float> p) {
  for (float& x : p) x = 1.0f / x;
  return p;
}

/// NTK-aware scaling: the base grows with the longest document beyond P.
double dynamic_theta(const RopeConfig& c, double factor, int64_t max_document_tokens) {
  const double P = static_cast<double>(c.max_position_embeddings), r = static_cast<double>(c.rotary_dim);
  const double S = std::max(P, static_cast<double>(max_document_tokens));
  return c.theta * std::pow(factor * S / P - (factor - 1), r / (r - 2));
}

/// Llama 3: long wavelengths are divided by `factor`, short ones kept, those between blended.
std::vector<float> llama3(const RopeConfig& c, float factor) {
  const float O = static_cast<float>(c.original_max_position_embeddings);
  const float low = static_cast<float>(c.low_freq_factor), high = static_cast<float>(c.high_freq_factor);
  std::vector<float> w = inverse(powers(c.theta, c.rotary_dim));
  for (float& x : w) {
    const float wavelength = (1.0f / x) * (2.0f * std::numbers::pi_v<float>);
    if (wavelength < O / high) continue;
    if (wavelength > O / low) {
      x /= factor;
      continue;
    }
    const float smooth = ((1.0f / wavelength) * O - low) / (high - low);
    x = (1.0f - smooth) * x / factor + smooth * x;
  }
  return w;
}

/// YaRN (Peng et al., 2023): dimensions that turn less than beta_slow times within O are interpolated, those that turn
/// more than beta_fast times are kept, with a linear ramp between.
std::vector<float> yarn(const RopeConfig& c, double factor) {
  const double r = static_cast<double>(c.rotary_dim), O = static_cast<double>(c.original_max_position_embeddings);
  const auto dimension_of = [&](double turns) {
    return r * std::log(O / (turns * 2 * std::numbers::pi)) / (2 * std::log(c.theta));
  };
  double low = dimension_of(c.beta_fast), high = dimension_of(c.beta_slow);
  if (c.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, r - 1);
  if (low == high) high += 0.001;

  std::vector<float> w = powers(c.theta, c.rotary_dim);
  for (size_t m = 0; m < w.size(); m++) {
    const float position = (static_cast<float>(m) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float keep = 1.0f - std::clamp(position, 0.0f, 1.0f);
    const float interpolated = 1.0f / (static_cast<float>(factor) * w[m]);
    w[m] = interpolated * (1.0f - keep) + (1.0f / w[m]) * keep;
  }
  return w;
}

double yarn_attention_factor(const RopeConfig& c, double factor) {
  if (c.attention_factor) return *c.attention_factor;
  if (c.mscale.value_or(0) != 0 && c.mscale_all_dim.value_or(0) != 0) {
    return yarn_temperature(factor, *c.mscale) / yarn_temperature(factor, *c.mscale_all_dim);
  }
  return yarn_temperature(factor, 1);
}

/// LongRoPE (Ding et al., 2024): one divisor per dimension, one list for documents up to O and one for longer ones.
std::vector<float> longrope(const RopeConfig& c, int64_t max_document_tokens) {
  const auto& divisors = max_document_tokens > c.original_max_position_embeddings ? c.long_factor : c.short_factor;
  std::vector<float> w = powers(c.theta, c.rotary_dim);
  CHECK(divisors.size() == w.size(), "longrope: {} factors for a rotary width of {}, expected {}", divisors.size(),
        c.rotary_dim, w.size());
  for (size_t m = 0; m < w.size(); m++) w[m] = 1.0f / (static_cast<float>(divisors[m]) * w[m]);
  return w;
}

double longrope_attention_factor(const RopeConfig& c, double factor) {
  if (c.attention_factor) return *c.attention_factor;
  const double O = static_cast<double>(c.original_max_position_embeddings);
  return factor <= 1 ? 1.0 : std::sqrt(1 + std::log(factor) / std::log(O));
}

}  // namespace

RopeTable make_rope_table(const RopeConfig& c, int64_t max_document_tokens) {
  const double P_over_O = static_cast<double>(c.max_position_embeddings) /
                          static_cast<double>(std::max<int64_t>(c.original_max_position_embeddings, 1));
  const double factor = c.factor.value_or(P_over_O);
  RopeTable table;
  if (c.type == "default") {
    table.inv_freq = inverse(powers(c.theta, c.rotary_dim));
  } else if (c.type == "linear") {
    table.inv_freq = inverse(powers(c.theta, c.rotary_dim));
    for (float& w : table.inv_freq) w /= static_cast<float>(factor);
  } else if (c.type == "dynamic") {
    table.inv_freq = inverse(powers(dynamic_theta(c, factor, max_document_tokens), c.rotary_dim));
  } else if (c.type == "llama3") {
    table.inv_freq = llama3(c, static_cast<float>(factor));
  } else if (c.type == "yarn") {
    table.inv_freq = yarn(c, factor);
    table.attention_factor = yarn_attention_factor(c, factor);
  } else if (c.type == "longrope") {
    table.inv_freq = longrope(c, max_document_tokens);
    table.attention_factor = longrope_attention_factor(c, factor);
  } else {
    fail("rotary embedding of type \"{}\" is not supported", c.type);
  }
  const auto bad =
      std::find_if(table.inv_freq.begin(), table.inv_freq.end(), [](float w) { return !std::isfinite(w) || !(w > 0); });
  CHECK(bad == table.inv_freq.end() && std::isfinite(table.attention_factor),
        "rotary embedding of type \"{}\" with rope_theta {}: frequency {} of {} is {} and the attention factor is {}, "
        "which "
        "fp32 cannot hold: check rope_theta and the factors in config.json",
        c.type, c.theta, bad - table.inv_freq.begin(), table.inv_freq.size(), bad == table.inv_freq.end() ? 0.0f : *bad,
        table.attention_factor);
  return table;
}
