// Texts, or pairs of texts, with a class each, as word pieces.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/word_pieces.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

/// A text, or two, as a model reads them: [CLS] first [SEP] second [SEP], then [PAD].
struct EncodedText {
  std::vector<std::int32_t> first, second;  // pieces
  bool pair = false;

  /// With those around the texts, uncut.
  std::size_t tokens() const { return first.size() + second.size() + (pair ? 3 : 2); }
};

/// Writes `text` into the sample's tokens and types, both of T; returns its length. What is too long is cut from the
/// end of the longer of the two, of equally long ones the second, until it fits.
std::int32_t write_sample(const WordPieces& pieces, const EncodedText& text, std::span<std::int32_t> tokens,
                          std::span<std::int32_t> types);

/// What a file has: rows of one text, or each of two, and a class.
struct TextRow {
  std::string first, second;
  std::int32_t label = 0;
  std::string source;  // for errors: "FILE, line 3"
};
struct TextRows {
  std::string name;  // for people: "csv reviews.csv"
  std::vector<std::string> classes;
  bool pairs = false;
  std::vector<TextRow> train, validation;  // no row for validation: it is no part, and `train` is the whole
  std::vector<TextRow> test = {};
  std::string reading = {};  // Dataset::Info::reading of those that are trained on, or of all
};

/// Those to train on, of which there are 10 or more (IoError), that is_held_out() are for validation instead.
void hold_out(TextRows& rows);

/// Samples of `rows`: tokens (T), token types (T: 1 for the second text and its [SEP]) and the length of each; targets
/// are the classes. T is options.context. Without options.word_pieces' pieces, these are learned from the texts that
/// are trained on. Says how many texts are cut. Throws UsageError for fewer options.classes than there are, and where
/// the options have no word pieces, IoError for texts that are not UTF-8 and for parts without a text.
DataSplits open_labelled_texts(TextRows rows, const OpenOptions& options);

}  // namespace lockstep::data
