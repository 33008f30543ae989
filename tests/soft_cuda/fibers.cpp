#include "fibers.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <new>

namespace lockstep::soft_cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStack = std::size_t{64} << 10;

}  // namespace

#if defined(__x86_64__) && !defined(LOCKSTEP_SOFT_CUDA_UCONTEXT)

// Keeps what a called function must keep. swapcontext() would also ask the kernel for the signal mask, each time.
extern "C" void lockstep_soft_cuda_switch(void** keep, void* go);
asm(R"(
.text
.globl lockstep_soft_cuda_switch
.type lockstep_soft_cuda_switch, @function
lockstep_soft_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lockstep_soft_cuda_switch, .-lockstep_soft_cuda_switch
)");

struct Fiber::State {
  void* top;
  void* inside;
  void* outside;

  explicit State(void* stack_top) : top(stack_top), inside(nullptr), outside(nullptr) {}
  void prepare(void (*entry)()) {
    auto** const at = static_cast<void**>(top);
    at[-1] = nullptr;  // where entry would return to
    at[-2] = reinterpret_cast<void*>(entry);
    for (int i = 3; i <= 8; ++i) at[-i] = nullptr;
    inside = at - 8;
  }
  void enter() { lockstep_soft_cuda_switch(&outside, inside); }
  void leave() { lockstep_soft_cuda_switch(&inside, outside); }
};

#else

struct Fiber::State {
  std::byte* bottom;
  std::size_t bytes;
  ucontext_t inside, outside;

  explicit State(void* stack_top) : bottom(static_cast<std::byte*>(stack_top) - kStack / 2), bytes(kStack / 2) {}
  void prepare(void (*entry)()) {
    getcontext(&inside);
    inside.uc_stack.ss_sp = bottom;
    inside.uc_stack.ss_size = bytes;
    inside.uc_link = nullptr;
    makecontext(&inside, entry, 0);
  }
  void enter() { swapcontext(&outside, &inside); }
  void leave() { swapcontext(&inside, &outside); }
};

#endif

Fiber::Fiber(std::size_t number) {
  void* const memory =
      ::mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  ::mprotect(memory_, kPage, PROT_NONE);
  std::byte* const end = memory_ + kPage + kStack - (number % 16) * 256;
  state_ = new (end - sizeof(State) / 64 * 64 - 64) State(end - sizeof(State) / 64 * 64 - 64);
}

Fiber::~Fiber() { ::munmap(memory_, kPage + kStack); }

void Fiber::prepare(void (*entry)()) { state_->prepare(entry); }
void Fiber::enter() { state_->enter(); }
void Fiber::leave() { state_->leave(); }

}  // namespace lockstep::soft_cuda
