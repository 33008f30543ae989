// What the program says to bad input: one line with cause and remedy, and the documented exit code.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

struct BadInput {
  std::string line;
  int code;
  std::string says;  // on its one line
};

class BadInputTest : public ::testing::TestWithParam<BadInput> {};

// The error lines among what a run wrote to stderr, without the launcher's account of the failure.
std::vector<std::string> error_lines(const std::string& err) {
  std::vector<std::string> errors;
  for (const auto& line : lines_of(err))
    if (line.find("error: ") != std::string::npos && line.find("lockstep:   |") == std::string::npos)
      errors.push_back(line);
  return errors;
}

TEST_P(BadInputTest, IsOneLineWithARemedy) {
  const TemporaryDirectory directory;
  // Files that some of the cases name.
  std::ofstream(directory.path() / "cut.safetensors") << "1234";
  std::ofstream(directory.path() / "hosts.txt") << "a slots=2\n# b\nc slotz=2\n";
  std::ofstream(directory.path() / "typo.toml") << "data = \"digits\"\nepocs = 3\n";
  std::ofstream(directory.path() / "betas.toml") << "optimizer = \"sgd\"\nbetas = [0.9, 0.99]\n";
  std::ofstream(directory.path() / "list.toml") << "lr = [1]\n";
  std::ofstream(directory.path() / "text.txt") << std::string(4000, 'a') + std::string(400, 'b');
  std::ofstream(directory.path() / "tokens.bin") << std::string(4000, '\1');
  ASSERT_EQ(::mkfifo((directory.path() / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("m.jsonl", directory.path() / "link.jsonl");
  std::ofstream(directory.path() / "m.jsonl") << "";
  const auto outcome = run(GetParam().line, directory.path());
  EXPECT_EQ(outcome.code, GetParam().code) << outcome.out << outcome.err;
  const auto errors = error_lines(outcome.err + outcome.out);
  ASSERT_EQ(errors.size(), 1u) << outcome.out << outcome.err;
  EXPECT_NE(errors[0].find(GetParam().says), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("→"), std::string::npos) << errors[0];
}

INSTANTIATE_TEST_SUITE_P(
    Alone, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep trian cnn --data digits", 2, "did you mean lockstep train"},
        BadInput{"lockstep train cn --data digits", 2, "did you mean"},
        BadInput{"lockstep train cnn --data digts", 2, "did you mean"},
        BadInput{"lockstep train cnn --data digits --bach 3", 2, "did you mean --batch"},
        BadInput{"lockstep train cnn --data digits --batch 0", 2, "--batch"},
        BadInput{"lockstep train cnn --data digits --batch 3 --global-batch 9", 2, "--global-batch"},
        BadInput{"lockstep train cnn --data digits --lr fast", 2, "--lr"},
        BadInput{"lockstep train cnn --data digits --label-smoothing 2", 2, "of at least 0 and below 1"},
        BadInput{"lockstep train cnn", 2, "data"}, BadInput{"lockstep train cnn --config typo.toml", 2, "typo.toml"},
        BadInput{"LOCKSTEP_EPOCS=3 lockstep train cnn --data digits", 2, "LOCKSTEP_EPOCS"},
        BadInput{"lockstep train cnn --data digits --zero 2", 2, "use --zero 1"},
        BadInput{"lockstep train cnn --data random:5,100", 2, "4x4"},
        BadInput{"lockstep train linear --data digits --out 3", 2, "10 classes"},
        BadInput{"lockstep train cnn --data digits --global-batch 2000 --tail drop", 2, "drop"},
        BadInput{"lockstep train resnet18 --data random:3x32x32,17 --global-batch 16", 2, "use --tail drop, or"},
        BadInput{"lockstep train cnn --data random:5,0", 3, "empty"},
        BadInput{"lockstep train cnn --data mnist:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data cifar10:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data images:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data images:.", 3, "holds no folders"},
        BadInput{"lockstep train cnn --data digits --image-size 64", 2, "--image-size"},
        BadInput{"lockstep train cnn --data digits --weights none.safetensors", 3, "none.safetensors"},
        BadInput{"lockstep train cnn --data digits --weights cut.safetensors", 3, "byte 4"},
        BadInput{"lockstep train cnn --data digits --metrics none/m.jsonl", 3, "none/m.jsonl"},
        BadInput{"lockstep train cnn --data digits --epochs 1 --quiet --metrics /dev/full", 3, "/dev/full"},
        // Before it trains, not hours later.
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save none/w.safetensors", 3, "none/w.safetensors"},
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save .", 3, "regular file"},
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save /dev/null", 3, "regular file"},
        BadInput{"lockstep train cnn --data digits --bucket-mb 1e300", 2, "--bucket-mb"},
        BadInput{"lockstep train cnn --data digits --clip-norm nan", 2, "--clip-norm"},
        BadInput{"lockstep train linear --data random:1,4000000000000000000 --global-batch 1 --epochs 9", 2,
                 "--epochs"},
        BadInput{"lockstep train linear --data random:1,40000000 --global-batch 40000000", 2,
                 "a step of 40000000 samples"},
        BadInput{"lockstep train cnn --data digits --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep train cnn --data digits --device cuda:9", 4, "--device cuda:9: "},
        BadInput{"lockstep train cnn --data digits --device cuda:free", 4, "--device cuda:free"},
        BadInput{"lockstep bench step cnn --device cuda", 4, "--device cuda: "},
        BadInput{"LOCKSTEP_DEVICE=cuda lockstep train cnn --data digits", 4, "--device cuda: "},
        BadInput{"lockstep train cnn --data digits --device tpu", 2, "tpu"},
        BadInput{"lockstep train cnn --data digits --device gpu", 2, "did you mean 'cuda'"},
        BadInput{"lockstep train cnn --data digits --device cpu:0,x", 2, "'x' is no number of a CPU device"},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cpu:0,1,0", 2, "names CPU device 0 twice"},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cuda:0,9", 4, "--device cuda:0,9: "},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cuda:free", 4, "--device cuda:free: "},
        BadInput{"lockstep train resnet18-cifar --data random:3x32x32,9 --parallel dp --sync-batchnorm", 2,
                 "--sync-batchnorm with"},
        BadInput{"lockstep train cnn --data digits --parallel pp", 2, "did you mean dp"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cpu:1", 2, "on 1 device"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cpu:1,1", 2, "names CPU device 1 twice"},
        BadInput{"lockstep bench dp-vs-ddp cn", 2, "did you mean"},
        BadInput{"lockstep bench dp-vs-ddp cnn --global-batch 2 --device cpu:0,1,2", 2, "2 samples for 3 devices"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep bench dp-vs-ddp mlp --hidden 8 --lr 1e30", 7, "NaN or infinite"},
        BadInput{"RANK=0 WORLD_SIZE=2 lockstep bench dp-vs-ddp cnn", 2, "without a launcher"},
        BadInput{"lockstep train cnn --data digits --device cuda:0,x", 2, "'x' is no number of a GPU"},
        BadInput{"lockstep train cnn --data digits --device cuda:0,0", 2, "names GPU 0 twice"},
        BadInput{"lockstep train cnn --data digits --device cuda --backend mpi", 2, "travel over NCCL"},
        BadInput{"lockstep train cnn --data digits --device cpu --backend nccl", 2, "--backend nccl"},
        BadInput{"lockstep train cnn --data digits --backend nccl", 2, "on the CPU ("},
        // As a processor without AVX-512.
        BadInput{"ONEDNN_MAX_CPU_ISA=AVX2 lockstep train cnn --data digits --device cpu --precision bf16", 2,
                 "--precision bf16 on this CPU, which computes with avx2: bf16 needs AVX-512 at least"},
        BadInput{"ONEDNN_MAX_CPU_ISA=AVX2 lockstep eval cnn --data digits --device cpu --precision bf16 --weights w", 2,
                 "bf16 needs AVX-512 at least"},
        BadInput{"ONEDNN_MAX_CPU_ISA=SSE41 lockstep bench step cnn --precision bf16", 2, "which computes with sse41"},
        BadInput{"lockstep train cnn --data digits --tf32", 2, "--tf32 is for GPUs"},
        BadInput{"lockstep train cnn --data digits --device cpu --precision fp16", 2,
                 "--precision fp16 is for GPUs, and this run is on the CPU"},
        BadInput{"lockstep eval cnn --data digits --device cpu --precision fp16 --weights w", 2,
                 "--precision fp16 is for GPUs"},
        BadInput{"lockstep bench step cnn --device cpu --precision fp16", 2, "--precision fp16 is for GPUs"},
        BadInput{"lockstep train cnn --data digits --precision fp17", 2, "did you mean fp16"},
        BadInput{"lockstep train cnn --data digits --device cuda --precision fp16 --loss-scale 0", 2,
                 "'0' is no scale of losses"},
        BadInput{"lockstep train cnn --data digits --device cuda --precision fp16 --local-sgd 2", 2,
                 "--precision fp16 with --local-sgd"},
        BadInput{"lockstep bench allreduce --backend nccl", 2, "--backend nccl"},
        BadInput{"lockstep train cnn --data digits --quiet --lr 1e30", 7, "at step 2"},
        BadInput{"lockstep train cnn --data digits --quiet --lr 1e30 --steps 1 --save w", 7, "evaluation loss"},
        BadInput{"RANK=0 WORLD_SIZE=2 MASTER_PORT=70000 lockstep train cnn --data digits", 2, "MASTER_PORT"},
        BadInput{"RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.such.host.invalid lockstep train cnn --data digits", 2,
                 "no.such.host.invalid"},
        BadInput{"RANK=1 WORLD_SIZE=2 MASTER_PORT=1 lockstep train cnn --data digits --timeout-seconds 0.5", 5,
                 "rank 0 did not come to 127.0.0.1:1"},
        BadInput{"RANK=2 WORLD_SIZE=2 lockstep train cnn --data digits", 2, "RANK"}));

// A setting that would change nothing: refused with the place where it stands, and what it applies to.
INSTANTIATE_TEST_SUITE_P(
    NoEffect, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep train cnn --data digits --dropout 0.5", 2,
                 "--dropout 0.5 on the command line: it applies to vgg11, gpt, gpt2, BERTs, rnn, lstm and gru, and the "
                 "model is cnn"},
        BadInput{"lockstep train cnn --data digits --encrypt --backend mpi", 2,
                 "it applies to what lockstep itself sends between hosts, and MPI (--backend mpi) does not encrypt"},
        BadInput{"lockstep train cnn --data digits --shards 2 --comm-hook bf16", 2,
                 "and --shards promises the same bits at any number of ranks"},
        BadInput{"lockstep train cnn --data digits --parallel dp --comm-hook topk:1", 2,
                 "and --parallel dp has one rank"},
        BadInput{"lockstep train cnn --data digits --comm-hook bf15", 2, "did you mean 'bf16'?"},
        BadInput{"lockstep train cnn --data digits --comm-hook powersgd:0", 2, "powersgd:R with R from 1"},
        BadInput{"lockstep train cnn --data digits --comm-hook topk:200", 2, "topk:P with P percent of each bucket"},
        BadInput{"lockstep bench step cnn --comm-hook fp16:3", 2, "fp16 takes no :3"},
        BadInput{"lockstep train cnn --data digits --device cuda --comm-hook topk:1", 2,
                 "--comm-hook topk:1 is for the CPU"},
        BadInput{"lockstep train cnn --data digits --layers 2", 2, "--layers 2 on the command line: it applies to gpt"},
        BadInput{"lockstep train lstm --data digits --heads 2", 2,
                 "it applies to gpt, gpt2 and BERTs, and the model is lstm"},
        BadInput{"lockstep train mlp --data digits --width 8", 2, "--width 8"},
        BadInput{"lockstep train gpt --data text:text.txt --max-length 8", 2,
                 "it applies to BERTs, and the model is gpt"},
        BadInput{"lockstep train gpt --data text:text.txt --vocab v.txt", 2, "--vocab v.txt on the command line"},
        BadInput{"lockstep train bert --data text:text.txt --vocab v.txt --vocab-size 99", 2, "there is --vocab"},
        BadInput{"lockstep train gpt --data text:text.txt --cased no", 2, "and the model is gpt"},
        BadInput{"lockstep infer gpt2 --prompt x --weights w --cased no", 2, "texts that BERTs read"},
        BadInput{"lockstep train cnn --data digits --hidden 5", 2, "it applies to mlp, and the model is cnn"},
        BadInput{"lockstep train resnet18-cifar --data random:3x32x32,9 --context 8", 2, "--context 8"},
        BadInput{"lockstep train lstm --data digits --context 8", 2, "lstm and gru, and the data is digits"},
        BadInput{"lockstep train gru --data digits --nonlinearity relu", 2, "it applies to rnn, and the model is gru"},
        BadInput{"lockstep train rnn --data digits --nonlinearity sigmoid", 2, "give one of tanh, relu"},
        BadInput{"lockstep train gpt --data text:text.txt --bidirectional", 2,
                 "it applies to rnn, lstm and gru, and the model is gpt"},
        BadInput{"lockstep train gru --data text:text.txt --bidirectional", 2, "it applies to the rows of images"},
        BadInput{"lockstep train gpt --data text:text.txt --stateful", 2,
                 "it applies to rnn, lstm and gru over text and tokens, and the model is gpt"},
        BadInput{"lockstep train gru --data digits --stateful", 2, "and the data is digits"},
        BadInput{"lockstep train gru --data random:tokens,64 --stateful", 2, "and the data is random"},
        BadInput{"lockstep train gru --data text:text.txt --stateful --accumulate 2", 2,
                 "and --accumulate 2 computes a batch in parts"},
        BadInput{"lockstep train gru --data text:text.txt --stateful --parallel dp", 2, "and --parallel dp shares"},
        BadInput{"lockstep train gru --data text:text.txt --stateful --tail pad", 2, "and --tail pad repeats rows"},
        BadInput{"lockstep train gru --data text:text.txt --context 4 --stateful --batch 1000000", 2,
                 "in batches of 1000000: none is followed by another"},
        BadInput{"lockstep eval gru --data text:text.txt --weights w --stateful", 2, "--stateful"},
        BadInput{"lockstep train mlp --data digits --in 64", 2, "--in 64"},
        BadInput{"lockstep train cnn --data digits --out 10", 2, "--out 10"},
        BadInput{"lockstep train cnn --data digits --zero-init-residual", 2, "it applies to ResNets"},
        BadInput{"lockstep train resnet18 --data random:3x32x32,9 --zero-init-residual --weights w", 2,
                 "this one starts from --weights w"},
        BadInput{"lockstep train cnn --data digits --no-broadcast-buffers", 2, "ResNets, and the model is cnn"},
        BadInput{"lockstep train gpt --data text:text.txt --sync-batchnorm", 2, "ResNets, and the model is gpt"},
        BadInput{"lockstep train cnn --data digits --augment yes", 2,
                 "it applies to cifar10, cifar100 and images, and the data is digits"},
        BadInput{"lockstep train gpt --data text:text.txt --image-size 8", 2,
                 "it applies to images, and the data is text"},
        BadInput{"lockstep train cnn --data digits --max-corrupt 8", 2, "--max-corrupt"},
        BadInput{"lockstep train gpt --data text:text.txt --text a", 2, "it applies to csv, and the data is text"},
        BadInput{"lockstep train cnn --data digits --label a", 2, "it applies to csv, and the data is digits"},
        BadInput{"lockstep train gpt --data text:text.txt --token-type u32", 2,
                 "it applies to tokens, and the data is text"},
        BadInput{"lockstep eval bert --data texts:d --weights w --quotes no", 2, "it applies to csv"},
        BadInput{"lockstep train gpt --data text:text.txt --classes 80", 2, "--classes 80"},
        BadInput{"lockstep train cnn --data digits --momentum 0.9", 2,
                 "it applies to --optimizer sgd and lars, and the optimizer is adamw"},
        BadInput{"lockstep train cnn --data digits --nesterov", 2, "--nesterov on the command line: it applies"},
        BadInput{"lockstep train cnn --data digits --opt sgd --momentum 0 --nesterov", 2, "the momentum is 0"},
        BadInput{"lockstep train cnn --data digits --optimizer sgd --betas 0.9,0.99", 2, "--betas 0.9,0.99"},
        BadInput{"lockstep train cnn --data digits --optimizer sgd --eps 1e-6", 2,
                 "it applies to --optimizer adamw, adam, lamb and lars, and the optimizer is sgd"},
        BadInput{"lockstep train cnn --data digits --always-adapt", 2,
                 "it applies to --optimizer lamb and lars, and the optimizer is adamw"},
        BadInput{"lockstep train cnn --data digits --optimizer lamb --trust-coefficient 0.1", 2,
                 "it applies to --optimizer lars, and the optimizer is lamb"},
        BadInput{"lockstep train cnn --data digits --optimizer lamb --momentum 0.5", 2, "--momentum 0.5"},
        BadInput{"lockstep train cnn --data digits --optimizer lars --weight-decay 0", 2,
                 "--optimizer lars without weight decay, where no parameter moves by its norm"},
        BadInput{"lockstep train cnn --data digits --config betas.toml", 2,
                 "betas.toml:2: betas = 0.9,0.99: it applies"},
        BadInput{"LOCKSTEP_MOMENTUM=0.5 lockstep train cnn --data digits", 2,
                 "LOCKSTEP_MOMENTUM=0.5 in the environment: it applies to --optimizer sgd"},
        BadInput{"lockstep train cnn --data digits --loss cross_entropi", 2, "did you mean cross_entropy?"},
        BadInput{"lockstep train cnn --data digits --label-smoothing 1", 2, "--label-smoothing 1"},
        BadInput{"lockstep eval cnn --data digits --weights w.safetensors --label-smoothing 0.1", 2, "label-smoothing"},
        BadInput{"lockstep train cnn --data digits --min-lr 1e-5", 2, "it applies to --schedule cosine and step"},
        BadInput{"lockstep train cnn --data digits --schedule cosine --end-factor 0.1", 2,
                 "it applies to --schedule linear, and the schedule is cosine"},
        BadInput{"lockstep train cnn --data digits --device cpu --graphs yes", 2, "it applies to GPUs"},
        BadInput{"lockstep train cnn --data digits --graphs yes", 2,
                 "--graphs yes is for GPUs, and this run is on the CPU ("},
        BadInput{"lockstep train cnn --data digits --device cuda --find-unused --graphs yes", 2, "--find-unused"},
        BadInput{"lockstep train cnn --data digits --device cpu --autotune yes", 2, "it applies to GPUs"},
        BadInput{"lockstep train cnn --data digits --autotune yes", 2,
                 "--autotune yes is for GPUs, and this run is on the CPU ("},
        BadInput{"lockstep train gpt --data random:tokens,9 --device cpu --deterministic no", 2,
                 "it applies to attention in bf16 or fp16 on GPUs, without --dropout, and this run has --device cpu"},
        BadInput{"lockstep train gpt --data random:tokens,9 --deterministic no", 2, "this run has --precision f32"},
        BadInput{"lockstep train cnn --data digits --loss-scale 1024", 2, "this run has --precision f32"},
        BadInput{"lockstep train cnn --data digits --device cuda --precision bf16 --deterministic no", 2,
                 "the model is cnn"},
        BadInput{"lockstep train cnn --data digits --device cpu --tf32", 2,
                 "--tf32 on the command line: it applies to GPUs"},
        BadInput{"lockstep train cnn --data digits --device cuda --threads 2", 2, "it applies to the CPU"},
        BadInput{"lockstep train cnn --data digits --device cpu --share-devices", 2, "--share-devices"},
        BadInput{"lockstep train cnn --data digits --device cpu:99", 2, "there is no CPU device 99 among 1"},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cpu:0,2", 2, "no CPU device 2 among 2"},
        BadInput{"lockstep train cnn --data digits --keep 2", 2, "add --checkpoint-dir DIR"},
        BadInput{"lockstep train cnn --data digits --checkpoint-every 2", 2, "add --checkpoint-dir DIR"},
        BadInput{"lockstep train cnn --data digits --checkpoint-mirror b:m", 2, "add --checkpoint-dir DIR"},
        BadInput{"lockstep train cnn --data digits --weights-key model", 2, "add --weights FILE"},
        BadInput{"lockstep train cnn --data digits --non-strict", 2, "add --weights FILE"},
        BadInput{"lockstep train cnn --data digits --keep-prefix", 2, "add --weights FILE"},
        BadInput{"lockstep train cnn --data digits --reset-head", 2, "add --weights FILE"},
        BadInput{"lockstep train cnn --data digits --quiet --log-every 5", 2, "--log-every and --quiet exclude"},
        BadInput{"lockstep eval cnn --data digits --weights w --dropout 0.1", 2, "it is a flag of lockstep train"},
        BadInput{"lockstep eval cnn --data digits --weights w --augment no", 2, "--augment"},
        BadInput{"lockstep eval cnn --data digits --weights w --graphs no", 2, "--graphs"},
        BadInput{"lockstep eval cnn --data digits --weights w --hidden 8", 2, "it applies to mlp"},
        BadInput{"lockstep eval cnn --data digits --weights w --device cpu:7", 2, "no CPU device 7"},
        BadInput{"lockstep bench step cnn --dropout 0.1", 2,
                 "it applies to vgg11, gpt, gpt2, BERTs, rnn, lstm and gru"},
        BadInput{"lockstep bench step lstm --data digits --context 9", 2, "the data is digits"},
        BadInput{"lockstep bench step cnn --device cpu --copy-batch yes", 2, "--copy-batch yes is for GPUs"},
        BadInput{"lockstep bench step cnn --csv --timeline", 2, "--csv and --timeline exclude"},
        BadInput{"lockstep bench dp-vs-ddp cnn --momentum 0.5", 2, "--momentum 0.5"},
        BadInput{"lockstep infer resnet18 --input random:1x3x32x32 --device cpu:0,1 --threads 1", 2, "and 1 stream"},
        BadInput{"lockstep infer gpt --weights w --prompt a --batch 2", 2, "texts are taken one by one"},
        BadInput{"lockstep infer resnet18 --input random:1x3x32x32 --device cpu --tf32", 2, "it applies to GPUs"},
        BadInput{"lockstep infer resnet18 --input random:1x3x32x32 --layers 2", 2, "the model is resnet18"},
        BadInput{"lockstep infer resnet18 --input random:1x3x32x32 --top 2", 2, "this run has --input random:"},
        BadInput{"lockstep infer gpt --weights w --prompt a --top 2", 2, "it applies to images that are classified"},
        BadInput{"lockstep infer gpt --weights w --prompt a --lines", 2, "this run has --prompt"},
        BadInput{"lockstep infer gpt --weights w --input t.csv --text a", 2, "this run has no --lines"},
        BadInput{"lockstep infer bert --weights w --input t.txt --lines --quotes no", 2, "this run has --input t.txt"},
        BadInput{"lockstep infer gpt --weights w --prompt a --temperature 0 --top-k 3", 2, "the temperature is 0"},
        BadInput{"lockstep infer gpt --weights w --prompt a --temperature 0 --seed 3", 2, "the temperature is 0"},
        BadInput{"lockstep infer cnn --weights w --input a.png --seed 3", 2, "--seed 3 on the command line"},
        BadInput{"lockstep infer cnn --weights w --input a.png --tokens 3", 2, "it applies to texts"},
        BadInput{"lockstep infer mlp --weights w --input a.png --image-size 8", 2, "--image-size 8"},
        BadInput{"lockstep infer nosuch --input random:1x3", 2, "unknown model 'nosuch'"},
        BadInput{"lockstep train nosuch", 2, "unknown model 'nosuch'"}, BadInput{"lockstep train ''", 2, "MODEL"}));

// What is written is neither what is read nor written twice, and files are files.
INSTANTIATE_TEST_SUITE_P(
    Files, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep train cnn --data digits --save x --metrics x", 2, "--save and --metrics are one file: x"},
        BadInput{"lockstep train cnn --data digits --save x --trace ./y/../x", 2, "--save and --trace are one file"},
        BadInput{"lockstep train cnn --data digits --metrics m.jsonl --save link.jsonl", 2, "are one file"},
        BadInput{"lockstep train cnn --data digits --checkpoint-dir x --save x", 2, "--checkpoint-dir are one file"},
        BadInput{"lockstep train cnn --data digits --weights cut.safetensors --metrics cut.safetensors", 2,
                 "--metrics would overwrite the file of --weights"},
        BadInput{"lockstep train gpt --data text:text.txt --save text.txt", 2, "overwrite the file of --data"},
        BadInput{"lockstep train gpt --data tokens:tokens.bin --trace tokens.bin", 2, "overwrite the file of --data"},
        BadInput{"lockstep train cnn --data digits --config list.toml --metrics list.toml --lr 1", 2, "list.toml"},
        BadInput{"LOCKSTEP_CONFIG=m.jsonl lockstep train cnn --data digits --metrics link.jsonl", 2,
                 "--metrics would overwrite the file of --config"},
        BadInput{"lockstep eval cnn --data digits --weights cut.safetensors --metrics ./cut.safetensors", 2,
                 "overwrite the file of --weights"},
        BadInput{"lockstep train cnn --data digits --metrics out.txt >out.txt", 2, "that standard output goes to"},
        BadInput{"lockstep train cnn --data digits --metrics -", 2, "--metrics -"},
        BadInput{"lockstep train cnn --data digits --trace -", 2, "--trace -"},
        BadInput{"lockstep train cnn --data digits --metrics pipe", 2, "metrics file pipe is a pipe"},
        BadInput{"lockstep eval cnn --data digits --weights pipe", 3, "cannot open weights pipe: not a regular file"},
        BadInput{"lockstep train cnn --data digits --save pipe", 3, "regular file"},
        BadInput{"lockstep train cnn --data digits --trace pipe", 3, "regular file"},
        BadInput{"lockstep train cnn --config pipe", 2, "cannot read config file pipe: not a regular file"},
        BadInput{"lockstep train gpt --data text:pipe", 3, "pipe: not a regular file"},
        BadInput{"lockstep train gpt --data tokens:pipe", 3, "pipe: not a regular file"},
        BadInput{"lockstep train cnn --config list.toml", 2, "list.toml:1: lr is a list"},
        BadInput{"lockstep train mlp --data digits --hidden 5 --hidden 6", 2, "--hidden is given twice"},
        BadInput{"lockstep launch -H a:1 -H b:1 -- true", 2, "--hosts is given twice"},
        BadInput{"lockstep launch -n 2 --max-restarts 1 --host-return-seconds 5 -- true", 2,
                 "--host-return-seconds is for jobs on "
                 "several hosts that are restarted"},
        BadInput{"lockstep launch -H a:1 --host-return-seconds 5 -- true", 2,
                 "--host-return-seconds is for jobs on several "
                 "hosts that are restarted"},
        BadInput{"RANK=0 WORLD_SIZE=2147483647 lockstep train cnn --data digits", 2, "WORLD_SIZE=\"2147483647\""},
        BadInput{"lockstep launch -n 1 --log-dir /proc/none/x -- true", 3, "--log-dir"}));

// On several ranks the same fault is still one line, and the code is the rank's own.
INSTANTIATE_TEST_SUITE_P(
    OnRanks, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep launch -n 2 --no-prefix -- lockstep train cnn --data digits --parallel dp", 2,
                 "--parallel dp is one process for all devices, and this is one of 2"},
        BadInput{"lockstep launch -n 2 --no-prefix -- lockstep train cnn --data digits --device cpu:0", 4,
                 "local rank 1"},
        BadInput{"lockstep launch -n 3 -- lockstep train cnn --data digits --bach 3", 2, "--batch"},
        BadInput{"lockstep launch --hostfile hosts.txt -- true", 2, "hosts.txt:3: "},
        BadInput{"lockstep launch --hosts localhost:2 -n 3 -- true", 2, "3 ranks, but the hosts have 2 slots"},
        BadInput{"lockstep launch --hosts no.such.host.invalid:2 -- true", 4, "host no.such.host.invalid: its name"},
        BadInput{"lockstep launch -n 3 -- lockstep train cnn --data mnist:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --quiet --lr 1e30", 7, "at step 2"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda:0,9", 4,
                 "--device cuda:0,9: "},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --backend nccl", 2, "--backend nccl"},
        BadInput{"ONEDNN_MAX_CPU_ISA=AVX2 lockstep launch -n 2 -- lockstep train cnn --data digits --precision bf16", 2,
                 "bf16 needs AVX-512 at least"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda:0,0", 2, "twice"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --global-batch 3 --tail pad", 2, "pad"},
        BadInput{"lockstep launch -n 2 -- bash -c \"exec lockstep train cnn --data digits --lr "
                 "0.\\$((OMPI_COMM_WORLD_RANK+1))\"",
                 5, "lr"},
        BadInput{"lockstep launch -n 2 -- bash -c \"exec lockstep train mlp --data digits --hidden "
                 "16,\\$((OMPI_COMM_WORLD_RANK+8))\"",
                 5, "parameter 2=fc2.weight f32 [9, 16]"}));

TEST(DeviceTest, UnavailableDeviceOnOneRankEndsAll) {
  const TemporaryDirectory directory;
  const auto outcome =
      run("ONEDNN_MAX_CPU_ISA=AVX2 lockstep launch -n 2 -- bash -c \"exec lockstep train cnn --data digits --precision "
          "\\$([ \\$OMPI_COMM_WORLD_RANK = 0 ] && echo f32 || echo bf16)\"",
          directory.path());
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_EQ(error_lines(outcome.err + outcome.out).size(), 1u) << outcome.out << outcome.err;
}

// What keeps this program from using a GPU, on machines that are known to have none for it.
TEST(DeviceTest, ExplainsWhyThereIsNoGpu) {
  const TemporaryDirectory directory;
  const auto outcome = run("lockstep train cnn --data digits --device cuda", directory.path());
  const bool built = run("lockstep version", directory.path()).out.find("nccl") != std::string::npos;
  std::vector<std::string> reasons = {"no NVIDIA driver is loaded", "no GPU is visible to this process",
                                      "the NVIDIA driver runs CUDA up to"};
  if (!built) reasons = {"this build computes on the CPU only"};
  EXPECT_TRUE(std::ranges::any_of(reasons, [&](const std::string& reason) {
    return outcome.err.find("error: --device cuda: " + reason) != std::string::npos;
  })) << outcome.err;
}

// Not SIGBUS, which would not show the cause.
TEST(DataTest, ATokenFileThatIsCutInUseIsOneLine) {
  for (const std::string launch : {"", "lockstep launch -n 2 -- "}) {
    const TemporaryDirectory directory;
    std::ofstream(directory.path() / "tokens.bin") << std::string(400'000, '\1');
    const auto outcome =
        run(launch +
                "lockstep train gpt --layers 1 --heads 1 --width 8 --context 8 --data tokens:tokens.bin "
                "--classes 300 --epochs 100000 --quiet --threads 1 --device cpu --metrics m.jsonl & "
                "pid=$!; for i in $(seq 3000); do [[ $(cat m.jsonl 2>/dev/null | wc -l) -ge 20 ]] && "
                "break; sleep 0.01; done; truncate -s 100 tokens.bin; wait $pid",
            directory.path());
    EXPECT_EQ(outcome.code, 3) << outcome.out << outcome.err;
    const auto errors = error_lines(outcome.err + outcome.out);
    // A second rank may only see that the first one has ended.
    EXPECT_TRUE(std::ranges::any_of(errors,
                                    [](const std::string& error) {
                                      return error.find("tokens.bin: it had 400000 bytes when it was opened") !=
                                             std::string::npos;
                                    }))
        << outcome.out << outcome.err;
    if (launch.empty()) {
      EXPECT_EQ(errors.size(), 1u) << outcome.err;
    }
  }
}

// How many ranks there are is not the command's to know: it runs, and says what stays unused.
TEST(DeviceTest, MoreDevicesThanRanksIsAWarning) {
  const TemporaryDirectory directory;
  const std::string line = "lockstep train linear --data digits --steps 1 --quiet --device cpu:0,1";
  const auto alone = run(line, directory.path());
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_NE(alone.err.find("--device cpu:0,1 names 2 devices, and this host has 1 rank"), std::string::npos)
      << alone.err;
  const auto both = run("lockstep launch -n 2 -- " + line, directory.path());
  EXPECT_EQ(both.code, 0) << both.err;
  EXPECT_EQ(both.err.find("names 2 devices"), std::string::npos) << both.err;
}

TEST(LaunchTest, ExportedValuesAreSetOnThisHostToo) {
  const TemporaryDirectory directory;
  const auto outcome =
      run("MINE=0 lockstep launch -n 1 --no-prefix --export MINE=1,YOURS=2 -- printenv MINE YOURS", directory.path());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "1\n2\n");
}

TEST(OutputTest, LostOutputOfALaunchIsAnError) {
  const TemporaryDirectory directory;
  const auto outcome = run("lockstep launch -n 1 -- echo hello >/dev/full", directory.path());
  EXPECT_EQ(outcome.code, 3);
  EXPECT_NE(outcome.err.find("output was lost: No space left"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::testing
