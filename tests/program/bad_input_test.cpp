// What the program says to bad input: one line with cause and remedy, and the documented exit code.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

class BadInputTest : public ::testing::TestWithParam<BadInput> {};

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
  expect_refused(GetParam(), directory.path());
}

INSTANTIATE_TEST_SUITE_P(Alone, BadInputTest, ::testing::ValuesIn(bad_inputs(R"(
2 lockstep
  trian cnn --data digits | did you mean lockstep train
  train cn --data digits | did you mean
  train cnn --data digts | did you mean
  train cnn | data
  train cnn --config typo.toml | typo.toml
  train cnn --data random:5,100 | 4x4
  train linear --data digits --out 3 | 10 classes
  train resnet18 --data random:3x32x32,17 --global-batch 16 | use --tail drop, or
  train linear --data random:1,4000000000000000000 --global-batch 1 --epochs 9 | --epochs
  train linear --data random:1,40000000 --global-batch 40000000 | a step of 40000000 samples
  train resnet18-cifar --data random:3x32x32,9 --parallel dp --sync-batchnorm | --sync-batchnorm with
  bench dp-vs-ddp cnn --device cpu:1 | on 1 device
  bench dp-vs-ddp cnn --device cpu:1,1 | names CPU device 1 twice
  bench dp-vs-ddp cn | did you mean
  bench dp-vs-ddp cnn --global-batch 2 --device cpu:0,1,2 | 2 samples for 3 devices
  eval cnn --data digits --weights w --zero 1 | --zero
  eval cnn --data digits --weights w --ema 0.9 | --ema
  bench step cnn --ema 0.9 | --ema
  eval cnn --data digits --device cpu --precision fp16 --weights w | --precision fp16 is for GPUs
  bench step cnn --device cpu --precision fp16 | --precision fp16 is for GPUs
  export | lockstep export needs a format
  export tflite cnn --weights w --output m.tflite | lockstep export writes no 'tflite'
  export onnx | needs a MODEL
  export onnx cn --weights w --output m.onnx | did you mean
  export onnx cnn --output m.onnx | export without weights
  export onnx cnn --weights w | export without a file to write
  export onnx cnn --weights w --output m.pb | does not end in .onnx
  export onnx cnn --weights w --outptu m.onnx | did you mean --output
  bench allreduce --backend nccl --device cpu | --backend nccl
  bench allreduce --memory own --in-flight 2 | --in-flight with --memory own
  bench broadcast --root 1 | --root 1, among 1 rank
  bench broadcast --op sum | --op
  bench send-recv --pattern latency | on one rank
  bench allreduce --compare mpl | give mpi
  bench allreduce --compare nccl --device cpu | works on GPUs' memory
  bench allreduce --iterations 2 --seconds 1 | --seconds
  bench barrier --min 8 | --min
2 lockstep train cnn --data digits
  --bach 3 | did you mean --batch
  --batch 0 | --batch
  --batch 3 --global-batch 9 | --global-batch
  --lr fast | --lr
  --label-smoothing 2 | of at least 0 and below 1
  --zero 2 | use --zero 1
  --zero 2 | --zero 2: backward writes gradients into
  --zero 3 | use --zero 1
  --zero -1 | --zero
  --zero yes | --zero
  --zero 1 --parallel dp --device cpu:0,1 | --parallel dp has one rank
  --steps 1 --shards 4 --global-batch 8 --accumulate 2 | --accumulate
  --steps 1 --shards 4 --global-batch 8 --parallel dp --device cpu:0,1 | --parallel dp
  --steps 1 --shards 0 --global-batch 8 | from 1 to 65536
  --steps 1 --shards 9 --global-batch 8 | 9 shards of a global batch of 8
  --steps 1 --balance fast | the balance 'fast'
  --steps 1 --balance speeds: | speeds:2,1,1
  --steps 1 --balance speeds:1,0 | above 0
  --steps 1 --balance speeds:1,nan | above 0
  --steps 1 --balance speeds:1,2 | 2 speeds for 1 ranks
  --steps 1 --audit 2 --shards 2 | at least 0 and at most 1
  --steps 1 --audit 0.1 | without --shards
  --steps 1 --audit 0.1 --shards 2 --precision fp16 | moves the losses' scale
  --steps 1 --on-bad-batch ignore | 'ignore' for bad batches
  --steps 1 --on-bad-batch skip:0 | skip:N of at most N
  --steps 1 --on-bad-batch skip --comm-hook powersgd:2 | which keeps something from step to step
  --steps 1 --on-bad-batch skip --comm-hook fp16 | which keeps something from step to step
  --steps 1 --on-bad-batch skip --local-sgd 2 | --local-sgd lets
  --steps 1 --on-bad-batch skip --parallel dp --device cpu:0,1 | --parallel dp has a copy
  --steps 1 --on-divergence ignore | 'ignore' for divergence
  --steps 1 --on-divergence rewind:0 --checkpoint-dir ck | rewind:K of at most K
  --steps 1 --on-divergence rewind | give --checkpoint-dir
  --steps 1 --on-divergence rewind --checkpoint-dir ck --trace t.json | one file of one run
  --steps 1 --balance auto --tail pad | --tail pad makes
  --steps 1 --balance auto --local-sgd 2 | --local-sgd lets
  --steps 1 --balance auto --parallel dp --device cpu:0,1 | --parallel dp has one rank
  --steps 1 --ema 0 | --ema
  --steps 1 --ema 1 | --ema
  --steps 1 --ema -0.1 | --ema
  --steps 1 --ema 1.5 | --ema
  --steps 1 --ema nan | --ema
  --steps 1 --ema x | --ema
  --steps 1 --ema "" | --ema
  --global-batch 2000 --tail drop | drop
  --image-size 64 | --image-size
  --bucket-mb 1e300 | --bucket-mb
  --clip-norm nan | --clip-norm
  --device tpu | tpu
  --device gpu | did you mean 'cuda'
  --device cpu:0,x | 'x' is no number of a CPU device
  --parallel dp --device cpu:0,1,0 | names CPU device 0 twice
  --parallel pp | did you mean dp
  --device cuda:0,x | 'x' is no number of a GPU
  --device cuda:0,0 | names GPU 0 twice
  --device cuda --backend mpi | travel over NCCL
  --device cpu --backend nccl | --backend nccl
  --backend nccl | on the CPU (
  --tf32 | --tf32 is for GPUs
  --device cpu --precision fp16 | --precision fp16 is for GPUs, and this run is on the CPU
  --precision fp17 | did you mean fp16
  --device cuda --precision fp16 --loss-scale 0 | '0' is no scale of losses
  --device cuda --precision fp16 --local-sgd 2 | --precision fp16 with --local-sgd
2
  LOCKSTEP_EPOCS=3 lockstep train cnn --data digits | LOCKSTEP_EPOCS
  RANK=0 WORLD_SIZE=2 lockstep bench dp-vs-ddp cnn | without a launcher
  ONEDNN_MAX_CPU_ISA=AVX2 lockstep train cnn --data digits --device cpu --precision bf16
    | --precision bf16 on this CPU, which computes with avx2: bf16 needs AVX-512 at least
  ONEDNN_MAX_CPU_ISA=AVX2 lockstep eval cnn --data digits --device cpu --precision bf16 --weights w
    | bf16 needs AVX-512 at least
  ONEDNN_MAX_CPU_ISA=SSE41 lockstep bench step cnn --precision bf16 | which computes with sse41
  RANK=0 WORLD_SIZE=2 MASTER_PORT=70000 lockstep train cnn --data digits | MASTER_PORT
  RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.such.host.invalid lockstep train cnn --data digits | no.such.host.invalid
  RANK=2 WORLD_SIZE=2 lockstep train cnn --data digits | RANK
3 lockstep
  train cnn --data random:5,0 | empty
  train cnn --data mnist:/nowhere | /nowhere
  train cnn --data cifar10:/nowhere | /nowhere
  train cnn --data images:/nowhere | /nowhere
  train cnn --data images:. | holds no folders
3 lockstep train cnn --data digits
  --tensorboard m.jsonl | cannot make directory m.jsonl for TensorBoard: Not a directory
  --tensorboard m.jsonl/b | cannot make directory m.jsonl/b for TensorBoard
  --status-port 0 --status-token-file none | cannot read the token in none
  --weights none.safetensors | none.safetensors
  --weights cut.safetensors | byte 4
  --metrics none/m.jsonl | none/m.jsonl
  --epochs 1 --quiet --metrics /dev/full | /dev/full
  --epochs 100000 --save none/w.safetensors | none/w.safetensors
  --epochs 100000 --save . | regular file
  --epochs 100000 --save /dev/null | regular file
4 lockstep train cnn --data digits
  --device cuda | --device cuda:\s
  --device cuda:9 | --device cuda:9:\s
  --device cuda:free | --device cuda:free
  --parallel dp --device cuda:0,9 | --device cuda:0,9:\s
  --parallel dp --device cuda:free | --device cuda:free:\s
4
  LOCKSTEP_DEVICE=cuda lockstep train cnn --data digits | --device cuda:\s
  lockstep bench step cnn --device cuda | --device cuda:\s
  lockstep bench dp-vs-ddp cnn --device cuda | --device cuda:\s
7 lockstep
  bench dp-vs-ddp mlp --hidden 8 --lr 1e30 | NaN or infinite
  train cnn --data digits --quiet --lr 1e30 | at step 2
  train cnn --data digits --quiet --lr 1e30 --steps 1 --save w | evaluation loss
5
  RANK=1 WORLD_SIZE=2 MASTER_PORT=1 lockstep train cnn --data digits --timeout-seconds 0.5
    | rank 0 did not come to 127.0.0.1:1
)")));

// A setting that would change nothing: refused with the place where it stands, and what it applies to.
INSTANTIATE_TEST_SUITE_P(NoEffect, BadInputTest, ::testing::ValuesIn(bad_inputs(R"(
2 lockstep train cnn --data digits
  --dropout 0.5
    | --dropout 0.5 on the command line: it applies to tabular, vgg11, mobilenet-v2, vision transformers, gpt, gpt2, BERTs, rnn, lstm and gru, and the model is cnn
  --encrypt --backend mpi
    | it applies to what lockstep itself sends between hosts, and MPI (--backend mpi) does not encrypt
  --shards 2 --comm-hook bf16 | and --shards promises the same bits at any number of ranks
  --parallel dp --comm-hook topk:1 | and --parallel dp has one rank
  --comm-hook bf15 | did you mean 'bf16'?
  --comm-hook powersgd:0 | powersgd:R with R from 1
  --comm-hook topk:200 | topk:P with P percent of each bucket
  --device cuda --comm-hook topk:1 | --comm-hook topk:1 is for the CPU
  --layers 2 | --layers 2 on the command line: it applies to vision transformers, gpt
  --hidden 5 | it applies to mlp and tabular, and the model is cnn
  --embedding-dim 4 | it applies to tabular, and the model is cnn
  --out 10 | --out 10
  --zero-init-residual | it applies to ResNets
  --no-broadcast-buffers | ResNets and mobilenet-v2, and the model is cnn
  --augment yes | it applies to cifar10, cifar100, images and tar, and the data is digits
  --erasing 0.5 | it applies to cifar10, cifar100, images and tar with --augment yes, and the data is digits
  --max-corrupt 8 | --max-corrupt
  --randaugment 2,9 | it applies to cifar10, cifar100, images and tar with --augment yes, and the data is digits
  --randaugment 2,31 | --randaugment
  --randaugment 2 | --randaugment
  --ignore-index -100 | --ignore-index -100 for digits train, whose labels are 0 to 9
  --ignore-index 10 | --ignore-index 10 for digits train, whose labels are 0 to 9
  --ignore-index 1,2 | --ignore-index
  --ignore-index 1.5 | --ignore-index
  --ignore-index 1 --mixup 0.2 | --ignore-index 1 with mixed samples
  --ignore-index 1 --loss focal | it applies to --loss cross_entropy, and the loss is focal
  --device cuda --ignore-index 1 --graphs yes | --ignore-index
  --mixup 0.2 --loss l1 | the targets of digits train are labels, and the loss l1 takes numbers
  --mixup -1 | --mixup -1
  --mixup 1,2 | --mixup 1,2
  --cutmix 1001 | --cutmix 1001
  --label a | it applies to csv, and the data is digits
  --target a | it applies to table, and the data is digits
  --ignore a | it applies to table, and the data is digits
  --numeric a | it applies to table, and the data is digits
  --categorical a | it applies to table, and the data is digits
  --quotes no | it applies to csv and table, and the data is digits
  --channels first | it applies to npy, and the data is digits
  --delta 2 | it applies to --loss huber, and the loss is cross_entropy
  --focusing 1 | it applies to --loss focal, and the loss is cross_entropy
  --class-weights 1,2 | --class-weights with 2 numbers for outputs of 10 classes
  --class-weights 1,x | --class-weights
  --loss l1 --class-weights 1,2 | --class-weights
  --pos-weight 2 | it applies to --loss bce, and the loss is cross_entropy
  --rise 0.4 | it applies to --schedule one-cycle
  --start-divisor 4 | it applies to --schedule one-cycle
  --end-divisor 4 | it applies to --schedule one-cycle
  --cycle-momentum 0.9,0.8 | it applies to --schedule one-cycle
  --schedule one-cycle --cycle-momentum 0.9 | --cycle-momentum
  --schedule one-cycle --cycle-momentum 1,0.8 | --cycle-momentum 1,0.8
  --schedule one-cycle --cycle-momentum 0.9,0.8 --optimizer lamb | with --optimizer lamb
  --schedule one-cycle --cycle-momentum 0.9,0.8 --optimizer sgd --momentum 0 | with --optimizer sgd
  --momentum-decay 0.1 | it applies to --optimizer nadam
  --optimizer muon --zero 1 | --zero 1 with --optimizer muon
  --optimizer muon --momentum 1 | Muon with a momentum of 1
  --momentum 0.9 | it applies to --optimizer sgd, lars, rmsprop and muon, and the optimizer is adamw
  --nesterov | --nesterov on the command line: it applies
  --opt sgd --momentum 0 --nesterov | the momentum is 0
  --optimizer sgd --betas 0.9,0.99 | --betas 0.9,0.99
  --optimizer sgd --eps 1e-6 | it applies to --optimizer adamw, adam, nadam, lamb, lars, rmsprop, adagrad and muon, and the optimizer is sgd
  --always-adapt | it applies to --optimizer lamb and lars, and the optimizer is adamw
  --optimizer lamb --trust-coefficient 0.1 | it applies to --optimizer lars, and the optimizer is lamb
  --optimizer lamb --momentum 0.5 | --momentum 0.5
  --optimizer lars --weight-decay 0 | --optimizer lars without weight decay, where no parameter moves by its norm
  --config betas.toml | betas.toml:2: betas = 0.9,0.99: it applies
  --loss cross_entropi | did you mean cross_entropy?
  --label-smoothing 1 | --label-smoothing 1
  --save-best accuracy | --save-best accuracy on the command line: it applies to a file of weights
  --keep-best 2 | it applies to a directory of checkpoints
  --keep-best 2 --keep 0 --checkpoint-dir c | --keep-best with --keep 0
  --restore-best | --save FILE --save-best accuracy
  --save-best f1 --save w.safetensors | --save-best f1: evaluations have no such value
  --eval-steps 5 --eval-every 1 | --eval-every
  --eval-steps 5 --local-sgd 2 | give a multiple of --local-sgd
  --patience -1 | --patience
  --min-lr 1e-5 | it applies to --schedule cosine, restarts, step, polynomial and plateau
  --schedule cosine --end-factor 0.1 | it applies to --schedule linear and exponential, and the schedule is cosine
  --device cpu --graphs yes | it applies to GPUs
  --graphs yes | --graphs yes is for GPUs, and this run is on the CPU (
  --device cuda --find-unused --graphs yes | --find-unused
  --device cpu --autotune yes | it applies to GPUs
  --autotune yes | --autotune yes is for GPUs, and this run is on the CPU (
  --loss-scale 1024 | this run has --precision f32
  --device cuda --precision bf16 --deterministic no | the model is cnn
  --device cpu --tf32 | --tf32 on the command line: it applies to GPUs
  --device cuda --threads 2 | it applies to the CPU
  --device cpu --share-devices | --share-devices
  --device cpu:99 | there is no CPU device 99 among 1
  --parallel dp --device cpu:0,2 | no CPU device 2 among 2
  --keep 2 | add --checkpoint-dir DIR
  --checkpoint-every 2 | add --checkpoint-dir DIR
  --checkpoint-mirror b:m | add --checkpoint-dir DIR
  --weights-key model | add --weights FILE
  --non-strict | add --weights FILE
  --keep-prefix | add --weights FILE
  --reset-head | add --weights FILE
  --histogram-steps 5 | it applies to --tensorboard DIR, without --zero, --local-sgd and --clip-value, and there is none
  --tensorboard b --histogram-steps 5 --zero 1 | --zero leaves a rank the gradients of its part
  --tensorboard b --histogram-steps 5 --local-sgd 2 | --local-sgd leaves each rank gradients of its own
  --tensorboard b --histogram-steps 5 --clip-value 1 | --clip-value changes gradients where they lie
  --status-address 0.0.0.0 | it applies to --status-port PORT, and there is none
  --status-token-file t | it applies to --status-port PORT, and there is none
  --status-port 65536 | --status-port
  --quiet --log-every 5 | --log-every and --quiet exclude
2 lockstep
  bench step cnn --comm-hook fp16:3 | fp16 takes no :3
  train lstm --data digits --heads 2 | it applies to vision transformers, gpt, gpt2, llama and BERTs, and the model is lstm
  train mlp --data digits --width 8 | --width 8
  train bert --data text:text.txt --vocab v.txt --vocab-size 99 | there is --vocab
  train resnet18-cifar --data random:3x32x32,9 --context 8 | --context 8
  train lstm --data digits --context 8 | lstm and gru, and the data is digits
  train gru --data digits --nonlinearity relu | it applies to rnn, and the model is gru
  train rnn --data digits --nonlinearity sigmoid | give one of tanh, relu
  train gru --data text:text.txt --bidirectional | it applies to the rows of images
  train gru --data digits --stateful | and the data is digits
  train cnn --data cifar10:d --augment no --randaugment 1,5 | training samples are read unchanged
  train cnn --data cifar10:d --randaugment 0,5 | --randaugment 0,5, which is no operation
  train cnn --data cifar10:d --augment no --erasing 0.5 | with --augment yes, and training samples are read unchanged
  eval cnn --data digits --weights w --mixup 0.2 | mixup
  train gru --data random:tokens,64 --stateful | and the data is random
  train gru --data text:text.txt --stateful --accumulate 2 | and --accumulate 2 computes a batch in parts
  train gru --data text:text.txt --stateful --parallel dp | and --parallel dp shares
  train gru --data text:text.txt --stateful --tail pad | and --tail pad repeats rows
  train gru --data text:text.txt --context 4 --stateful --batch 1000000
    | in batches of 1000000: none is followed by another
  eval gru --data text:text.txt --weights w --stateful | --stateful
  train mlp --data digits --in 64 | --in 64
  train resnet18 --data random:3x32x32,9 --zero-init-residual --weights w | this one starts from --weights w
  eval bert --data texts:d --weights w --quotes no | it applies to csv
  eval cnn --data digits --weights w.safetensors --label-smoothing 0.1 | label-smoothing
  train gpt --data random:tokens,9 --device cpu --deterministic no
    | it applies to attention in bf16 or fp16 on GPUs, without --dropout, and this run has --device cpu
  train gpt --data random:tokens,9 --deterministic no | this run has --precision f32
  eval cnn --data digits --weights w --dropout 0.1 | it is a flag of lockstep train
  eval cnn --data digits --weights w --augment no | --augment
  eval cnn --data digits --weights w --graphs no | --graphs
  eval cnn --data digits --weights w --hidden 8 | it applies to mlp
  eval cnn --data digits --weights w --device cpu:7 | no CPU device 7
  bench step cnn --dropout 0.1 | it applies to tabular, vgg11, mobilenet-v2, vision transformers, gpt, gpt2, BERTs, rnn, lstm and gru
  bench step lstm --data digits --context 9 | the data is digits
  bench step cnn --device cpu --copy-batch yes | --copy-batch yes is for GPUs
  bench step cnn --csv --timeline | --csv and --timeline exclude
  bench dp-vs-ddp cnn --momentum 0.5 | --momentum 0.5
  train nosuch | unknown model 'nosuch'
  train '' | MODEL
2 lockstep train gpt --data text:text.txt
  --max-length 8 | it applies to BERTs, and the model is gpt
  --schedule plateau --eval-every 0 | it follows evaluations
  --merges m.txt | it applies to a vocab.json, and there is no --vocab
  --cased no | and the model is gpt
  --bidirectional | it applies to rnn, lstm and gru, and the model is gpt
  --stateful | it applies to rnn, lstm and gru over text and tokens, and the model is gpt
  --sync-batchnorm | ResNets and mobilenet-v2, and the model is gpt
  --image-size 8 | it applies to images and tar, and the data is text
  --mixup 0.2 | it applies to digits, mnist, cifar10, cifar100, images and tar, and the data is text
  --cutmix 1 | it applies to digits, mnist, cifar10, cifar100, images and tar, and the data is text
  --text a | it applies to csv, and the data is text
  --token-type u32 | it applies to tokens, and the data is text
  --classes 80 | --classes 80
2 lockstep infer
  gpt2 --prompt x --weights w --cased no | texts that BERTs read
  resnet18 --input random:1x3x32x32 --device cpu:0,1 --threads 1 | and 1 stream
  gpt --weights w --prompt a --batch 2 | texts are taken one by one
  resnet18 --input random:1x3x32x32 --device cpu --tf32 | it applies to GPUs
  resnet18 --input random:1x3x32x32 --layers 2 | the model is resnet18
  resnet18 --input random:1x3x32x32 --top 2 | this run has --input random:
  gpt --weights w --prompt a --top 2 | it applies to images and rows that are classified
  gpt --weights w --prompt a --lines | this run has --prompt
  gpt --weights w --input t.csv --text a | this run has no --lines
  bert --weights w --input t.txt --lines --quotes no | this run has --input t.txt
  gpt --weights w --prompt a --temperature 0 --top-k 3 | the temperature is 0
  gpt --weights w --prompt a --temperature 0 --seed 3 | the temperature is 0
  cnn --weights w --input a.png --seed 3 | --seed 3 on the command line
  cnn --weights w --input a.png --tokens 3 | it applies to texts
  mlp --weights w --input a.png --image-size 8 | --image-size 8
  nosuch --input random:1x3 | unknown model 'nosuch'
2 lockstep export onnx
  gpt --weights w --output m.onnx --class-names n | it applies to images and rows that are classified
  mlp --weights w --output m.onnx --image-size 8 | --image-size 8
  cnn --weights w --output m.onnx --layers 2 | the model is cnn
  cnn --output m.onnx --non-strict | it applies to a file of weights
2
  LOCKSTEP_MOMENTUM=0.5 lockstep train cnn --data digits
    | LOCKSTEP_MOMENTUM=0.5 in the environment: it applies to --optimizer sgd
)")));

// What is written is neither what is read nor written twice, and files are files.
INSTANTIATE_TEST_SUITE_P(Files, BadInputTest, ::testing::ValuesIn(bad_inputs(R"(
2 lockstep train cnn --data digits
  --save x --metrics x | --save and --metrics are one file: x
  --save x --trace ./y/../x | --save and --trace are one file
  --metrics m.jsonl --save link.jsonl | are one file
  --checkpoint-dir x --save x | --checkpoint-dir are one file
  --weights cut.safetensors --metrics cut.safetensors | --metrics would overwrite the file of --weights
  --config list.toml --metrics list.toml --lr 1 | list.toml
  --metrics out.txt >out.txt | that standard output goes to
  --metrics - | --metrics -
  --trace - | --trace -
  --tensorboard - | --tensorboard -
  --tensorboard b --checkpoint-dir ./b | --tensorboard and --checkpoint-dir are one file
  --metrics m.jsonl --status-port 0 --status-token-file m.jsonl | --metrics would overwrite the file of --status-token-file
  --status-port 0 --status-address 0.0.0.0 | without a token
  --status-port 0 --status-address here | --status-address here is no IP address
  --status-port 0 --status-address 192.0.2.1 --status-token-file hosts.txt | the token in hosts.txt is not 16 to 1024
  --metrics pipe | metrics file pipe is a pipe
2 lockstep
  train gpt --data tokens:tokens.bin --trace tokens.bin | overwrite the file of --data
  eval cnn --data digits --weights cut.safetensors --metrics ./cut.safetensors | overwrite the file of --weights
  train cnn --config pipe | cannot read config file pipe: not a regular file
  train cnn --config list.toml | list.toml:1: lr is a list
  train mlp --data digits --hidden 5 --hidden 6 | --hidden is given twice
  launch -H a:1 -H b:1 -- true | --hosts is given twice
  launch -n 2 --max-restarts 1 --host-return-seconds 5 -- true
    | --host-return-seconds is for jobs on several hosts that are restarted
  launch -H a:1 --host-return-seconds 5 -- true | --host-return-seconds is for jobs on several hosts that are restarted
  train gpt --data text:text.txt --save text.txt | overwrite the file of --data
2
  LOCKSTEP_CONFIG=m.jsonl lockstep train cnn --data digits --metrics link.jsonl
    | --metrics would overwrite the file of --config
  RANK=0 WORLD_SIZE=2147483647 lockstep train cnn --data digits | WORLD_SIZE="2147483647"
3 lockstep
  eval cnn --data digits --weights pipe | cannot open weights pipe: not a regular file
  export onnx cnn --weights cut.safetensors --output m.onnx | cut.safetensors
  train gpt --data text:pipe | pipe: not a regular file
  train gpt --data tokens:pipe | pipe: not a regular file
  launch -n 1 --log-dir /proc/none/x -- true | --log-dir
  train cnn --data digits --save pipe | regular file
  train cnn --data digits --trace pipe | regular file
)")));

// On several ranks the same fault is still one line, and the code is the rank's own.
INSTANTIATE_TEST_SUITE_P(OnRanks, BadInputTest, ::testing::ValuesIn(bad_inputs(R"table(
2 lockstep
  launch -n 2 --no-prefix -- lockstep train cnn --data digits --parallel dp
    | --parallel dp is one process for all devices, and this is one of 2
  launch -n 3 -- lockstep train cnn --data digits --bach 3 | --batch
  launch --hostfile hosts.txt -- true | hosts.txt:3:\s
  launch --hosts localhost:2 -n 3 -- true | 3 ranks, but the hosts have 2 slots
  launch -n 2 -- lockstep train cnn --data digits --backend nccl | --backend nccl
  launch -n 2 -- lockstep train cnn --data digits --device cuda:0,0 | twice
  launch -n 2 -- lockstep train cnn --data digits --global-batch 3 --tail pad | pad
4 lockstep
  launch -n 2 --no-prefix -- lockstep train cnn --data digits --device cpu:0 | local rank 1
  launch --hosts no.such.host.invalid:2 -- true | host no.such.host.invalid: its name
  launch -n 2 -- lockstep train cnn --data digits --device cuda | --device cuda:\s
  launch -n 2 -- lockstep train cnn --data digits --device cuda:0,9 | --device cuda:0,9:\s
3 lockstep
  launch -n 3 -- lockstep train cnn --data mnist:/nowhere | /nowhere
7 lockstep launch -n 2 -- lockstep train cnn --data digits
  --quiet --lr 1e30 | at step 2
2
  ONEDNN_MAX_CPU_ISA=AVX2 lockstep launch -n 2 -- lockstep train cnn --data digits --precision bf16
    | bf16 needs AVX-512 at least
5 lockstep
  launch -n 2 -- bash -c "exec lockstep train cnn --data digits --lr 0.\$((OMPI_COMM_WORLD_RANK+1))" | lr
  launch -n 2 -- bash -c "exec lockstep train mlp --data digits --hidden 16,\$((OMPI_COMM_WORLD_RANK+8))"
    | parameter 2=fc2.weight f32 [9, 16]
)table")));

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
  const auto alone = run_well(line, directory.path());
  EXPECT_NE(alone.err.find("--device cpu:0,1 names 2 devices, and this host has 1 rank"), std::string::npos)
      << alone.err;
  const auto both = run_well("lockstep launch -n 2 -- " + line, directory.path());
  EXPECT_EQ(both.err.find("names 2 devices"), std::string::npos) << both.err;
}

TEST(LaunchTest, ExportedValuesAreSetOnThisHostToo) {
  const TemporaryDirectory directory;
  const auto outcome = run_well(
      "MINE=0 lockstep launch -n 1 --no-prefix --export MINE=1,YOURS=2 -- printenv MINE YOURS", directory.path());
  EXPECT_EQ(outcome.out, "1\n2\n");
}

TEST(OutputTest, LostOutputOfALaunchIsAnError) {
  const TemporaryDirectory directory;
  EXPECT_THAT(run("lockstep launch -n 1 -- echo hello >/dev/full", directory.path()),
              fails_with(3, "output was lost: No space left"));
}

}  // namespace
}  // namespace lockstep::testing
