#include "fibers.h"

#include <sys/mman.h>

#include <new>

namespace lockstep::soft_cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStack = std::size_t{256} << 10;

}  // namespace

Fiber::Context Fiber::outside;
Stretch Fiber::all_stacks;

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

void Fiber::switch_to(Context& from, Context& to) { lockstep_soft_cuda_switch(&from, to); }

void Fiber::prepare(void (*entry)()) {
  auto** const at = reinterpret_cast<void**>(top_);
  at[-1] = nullptr;  // where entry would return to
  at[-2] = reinterpret_cast<void*>(entry);
  for (int i = 3; i <= 8; ++i) at[-i] = nullptr;
  inside_ = at - 8;
}

#else

void Fiber::switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

void Fiber::prepare(void (*entry)()) {
  getcontext(&inside_);
  inside_.uc_stack.ss_sp = memory_ + kPage;
  inside_.uc_stack.ss_size = static_cast<std::size_t>(top_ - memory_) - kPage;
  inside_.uc_link = nullptr;
  makecontext(&inside_, entry, 0);
}

#endif

Fiber::Fiber(std::size_t number) {
  if (all_stacks.bytes == 0) {
    constexpr std::size_t kAll = kMost * (kPage + kStack);
    void* const memory = ::mmap(nullptr, kAll, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    all_stacks = {reinterpret_cast<std::uintptr_t>(memory), kAll};
  }
  if (number >= kMost) throw std::bad_alloc();
  memory_ = reinterpret_cast<std::byte*>(all_stacks.begin) + number * (kPage + kStack);
  if (::mprotect(memory_ + kPage, kStack, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  top_ = memory_ + kPage + kStack - number % 16 * 256;
}

Fiber::~Fiber() { ::mprotect(memory_ + kPage, kStack, PROT_NONE); }

void Fiber::enter() { switch_to(outside, inside_); }
void Fiber::go_to(Fiber& next) { switch_to(inside_, next.inside_); }
void Fiber::leave() { switch_to(inside_, outside); }

}  // namespace lockstep::soft_cuda
