// What a run is made of: data, model, optimizer, as the configuration names them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/model_metadata.h"
#include "comm/agree.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/step.h"

namespace lockstep::trainer {

class BestWatch;
struct TrainHooks;

/// The metadata of the weights that a run saves: of a model that is trained on `dataset`.
checkpoint::ModelMetadata model_metadata_of(const TrainConfig& config, const data::Dataset& dataset);

/// The file that a run starts from.
struct RunWeights {
  std::vector<nn::HostTensor> tensors;
  std::optional<checkpoint::ModelMetadata> metadata;
};

/// Reads config.weights, if any. Sizes that `config` leaves open become those of the metadata, or, in files of other
/// programs, those that the tensors' shapes give (spec_of()): the model's, the size of images, and of data whose number
/// of tokens or classes only flags say, that number. Throws UsageError where the two contradict each other, IoError for
/// the file.
RunWeights apply_weights(TrainConfig& config);

/// Throws UsageError where `config` wants one process for all devices and this process is one of several ranks.
void check_alone(const TrainConfig& config);

/// --parallel dp: a model that batches are shared out through. The module is on session.backend, which is the first
/// device, where the devices' losses are added up; both must outlive it.
class DataParallelModel {
 public:
  DataParallelModel(const TrainConfig& config, session::Session& session, nn::Module& module);

  parallel::DataParallel& module() { return module_; }
  /// By place among the devices.
  nn::Backend& backend(std::size_t place) { return devices_[module_.device_ids()[place]]; }
  /// For people: "cpu:0, cpu:1: each cpu, 1 thread, …".
  std::string describe() const;

 private:
  nn::Backend& first_;
  parallel::Devices devices_;
  parallel::DataParallel module_;
};

/// The part of `config` that is a session's. Kernels of GPUs are timed unless it says not to.
session::SessionOptions session_options_of(const TrainConfig& config);
/// Collective: session::open_session(), where `refusal` and `config` are what is checked. One rank warns of what has no
/// effect.
session::Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal);

/// A text is read with the characters of `metadata`, if it has any. Throws UsageError for names and sizes that cannot
/// be, IoError for files.
data::DataSplits open_splits(const TrainConfig& config,
                             const std::optional<checkpoint::ModelMetadata>& metadata = std::nullopt,
                             const data::Parts& parts = {});

/// Without --loss, data whose targets are numbers have the first loss for these. Throws UsageError for settings
/// of another one.
void apply_targets(TrainConfig& config, const data::Dataset& dataset);
/// Whether evaluations look at what the model returns, too (Evaluator::measure): of lockstep's own models, and on one
/// device.
bool measures_outputs(const TrainConfig& config);

/// Collective: rank 0 warns of samples that were replaced because they could not be read.
void warn_of_corrupt(const data::DataSplits& splits, comm::ProcessGroup& group);

/// What the model's setting for classes says, if it has one and it was given.
std::optional<std::int64_t> classes_setting(const ModelConfig& model);
/// Height and width in pixels of images for this model, where nobody says any.
int usual_image_size(const std::string& model);
/// Tokens of a sample, for a model that takes tokens.
std::int64_t tokens_of(const ModelConfig& model);

/// Complete, with the shape of `dataset`'s samples and its classes.
nn::ModelSpec model_spec(const ModelConfig& model, const data::Dataset& dataset);

/// With the shape of `dataset`'s samples and its classes; with `weights`, where config.weights names any. Without
/// `draws` first values are zeros, for a rank that is sent another one's: drawing takes longer than sending. Throws
/// UsageError, also where metadata names other classes or tokens than the data have, and IoError.
std::unique_ptr<nn::Module> build_model(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset,
                                        const RunWeights& weights = {}, bool draws = true);

/// The same model on a backend of shapes (nn::make_meta_backend): frozen like it, without values.
std::unique_ptr<nn::Module> build_shapes(const TrainConfig& config, nn::Backend& meta, const data::Dataset& dataset);

/// `parameters` must outlive it. `share`: DistributedDataParallel::share().
std::unique_ptr<nn::Optimizer> make_optimizer(const TrainConfig& config,
                                              const std::vector<nn::NamedParameter>& parameters,
                                              nn::OptimizerShare share = {});

/// What is minimised in training, and measured in evaluations.
/// Throws UsageError for more than can be counted.
std::int64_t total_steps(const TrainConfig& config, std::int64_t steps_per_epoch);

nn::LossFunction training_loss(const TrainConfig& config);
/// The label of which that takes no account; none where all count.
std::optional<std::int32_t> ignored_label_of(const TrainConfig& config);
nn::LossFunction evaluation_loss(const TrainConfig& config);

/// A step as the flags want it.
TrainingStep::Options step_options(const TrainConfig& config);
/// Whether repeated steps are captured as graphs, if the device can; steps on several devices are not.
bool wants_graphs(const TrainConfig& config);

/// This rank's share of `length` samples. Throws UsageError for steps of more samples than f32 can count.
/// `shares`: sampler::SamplerConfig's.
sampler::DistributedSampler make_sampler(const TrainConfig& config, std::uint64_t length, int rank, int world_size,
                                         std::vector<std::uint32_t> shares = {});

/// The step checks for unused parameters (TrainingStep).
parallel::DistributedDataParallel::Options ddp_options(const TrainConfig& config);

/// Collective: the hook that the flags name carries the gradients. One rank warns where that saves no bytes.
void register_hook(const TrainConfig& config, parallel::DistributedDataParallel& ddp);
/// What a step's gradients take on the wire; nothing without a hook, in a world of one, and where the hook does not
/// say.
std::optional<HookReport> hook_report_of(const ddp::Reducer& reducer);

/// The learning rate of a step, from 0: the program's own, or what the schedule makes of the evaluations that `watch`,
/// if there is one, has followed. Throws UsageError for a number of the program's that is no rate.
double rate_of(const TrainHooks& hooks, const nn::LearningRate& schedule, std::int64_t step, std::int64_t total_steps,
               const BestWatch* watch);

/// train(), with what it calls; `hooks` are there meanwhile.
int run_training(const TrainConfig& config, const std::optional<UsageError>& refusal, const TrainHooks& hooks);

/// What must be the same on every rank before they train together, each with so many `threads`.
comm::Manifest manifest_of(const TrainConfig& config, const nn::Module& model, const data::Dataset& dataset,
                           int threads);

/// What ranks that take steps alone average: parameters and moments (parallel: Note [Local SGD]).
std::vector<nn::Tensor> averaged_tensors(const parallel::DistributedDataParallel& ddp, const nn::Optimizer& optimizer);

}  // namespace lockstep::trainer
