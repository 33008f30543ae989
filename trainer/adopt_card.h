// From a run to its model's card, and from a card to a run.
#pragma once

#include <optional>
#include <string>

#include "trainer/config.h"
#include "trainer/model_card.h"

namespace lockstep::trainer {

/// Of a model that is trained on `dataset`.
ModelCard card_of(const TrainConfig& config, const data::Dataset& dataset);

/// Of a file: nothing where it is another program's, or of another kind. Throws IoError as nn::read_weights() does.
std::optional<ModelCard> read_card(const std::string& path);

/// Sizes that `model` leaves open become those of the card. Throws UsageError naming the flag for others, and for
/// another model.
void adopt(ModelConfig& model, const ModelCard& card, const std::string& source);

}  // namespace lockstep::trainer
