/* lockstep's collectives and gradient reducer for C, and for languages that call C: find_package(lockstep COMPONENTS
 * c).
 *
 * Results. Every function returns LOCKSTEP_OK or a code of lockstep_error_code; lockstep_last_error() says what was
 * wrong, and what to do about it. No exception leaves a function. An argument that is NULL where it must not be, a
 * handle that has been destroyed and a number of no enumeration are LOCKSTEP_ERROR_USAGE. What a function returns by a
 * pointer is written if it returns LOCKSTEP_OK, and left alone otherwise.
 *
 * Order. Collective functions are called by all ranks of their group, in the same order, with the same arguments but
 * for the values. After an operation failed, the group is broken: every later call on it fails with the same error.
 *
 * Handles. A handle is destroyed once; NULL may be destroyed. What was made of a group may be destroyed after it, and
 * is of no other use then. A handle's address is never used again, so one that was destroyed is recognised.
 *
 * Memory. What a function is given by a pointer stays the caller's and is used during the call alone, but for the
 * values of lockstep_isend() and lockstep_irecv().
 *
 * Threads. One thread at a time uses a group and what was made of it; different groups may be used by different
 * threads.
 */
#ifndef LOCKSTEP_H
#define LOCKSTEP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What this header declares. Higher versions only add functions, and fields at the ends of structs with a size. */
#define LOCKSTEP_ABI_VERSION 1
/* What the library is. */
int lockstep_abi_version(void);

/* ---- Errors ---- */

/* The exit codes of the program lockstep, too; 128 + n: a stop that was asked for by signal n. */
enum lockstep_error_code {
  LOCKSTEP_OK = 0,
  LOCKSTEP_ERROR_INTERNAL = 1, /* a bug in lockstep */
  LOCKSTEP_ERROR_USAGE = 2,    /* the caller asked for something that cannot be */
  LOCKSTEP_ERROR_DATA = 3,
  LOCKSTEP_ERROR_DEVICE = 4,  /* memory, network or a device failed, or another rank ended */
  LOCKSTEP_ERROR_TIMEOUT = 5, /* another rank did not answer, or does something else */
  LOCKSTEP_ERROR_CHECKPOINT = 6,
  LOCKSTEP_ERROR_DIVERGED = 7
};

/* Of the last function that failed on this thread: one line, "what → remedy", in UTF-8; "" if none has. Good until the
 * next one fails, or the thread ends. */
const char* lockstep_last_error(void);
/* Whether it is the failure of another rank, which reports it: this one need not. */
int lockstep_last_error_is_of_peer(void);

/* ---- Groups ---- */

typedef struct lockstep_group lockstep_group;

enum lockstep_progress {
  LOCKSTEP_PROGRESS_AUTO = 0,
  LOCKSTEP_PROGRESS_THREAD = 1, /* a thread of the group moves operations on */
  LOCKSTEP_PROGRESS_INLINE = 2  /* the caller does, whenever it issues, asks or waits */
};

typedef struct lockstep_group_options {
  size_t size;                  /* of this struct, as the caller knows it */
  double timeout_seconds;       /* how long a rank waits for the others */
  double stall_warning_seconds; /* how long a wait lasts before a line says who is waited for; 0: never */
  const char* backend;          /* "auto", "shm", "hosts" or "mpi" */
  int progress;                 /* lockstep_progress */
  int encrypt;                  /* not 0: all that ranks of different hosts say to each other is encrypted */
} lockstep_group_options;

/* Writes the defaults. `size` is sizeof *options: what a library of a later version knows beyond that is left alone. */
int lockstep_group_options_init(lockstep_group_options* options, size_t size);

/* Joins the ranks that the environment names: those of `lockstep launch`, mpirun, srun or torchrun. Collective.
 * `options` may be NULL. */
int lockstep_group_make(const lockstep_group_options* options, lockstep_group** group);
/* Collective: the ranks that give the same `color` become a group, in the order of `key`. A negative color: in none,
 * and *part is NULL. The part may end after this group. */
int lockstep_group_split(lockstep_group* group, int color, int key, lockstep_group** part);
int lockstep_group_rank(lockstep_group* group, int* rank);
int lockstep_group_size(lockstep_group* group, int* size);
/* The number that rank `rank` of this group has in the job. */
int lockstep_group_job_rank(lockstep_group* group, int rank, int* job_rank);
/* "self", "shm", "hosts" or "mpi"; good until the group is destroyed. */
int lockstep_group_backend(lockstep_group* group, const char** backend);
/* Collective: ends the group in an orderly way. Only lockstep_group_destroy() may be called afterwards. */
int lockstep_group_shutdown(lockstep_group* group);
/* Not collective. Without lockstep_group_shutdown() before, the other ranks take this one for lost. */
int lockstep_group_destroy(lockstep_group* group);

/* ---- Collectives on the caller's memory: blocking; they copy to memory that the ranks share, and back ---- */

enum lockstep_dtype {
  LOCKSTEP_F32 = 0,
  LOCKSTEP_F64 = 1,
  LOCKSTEP_BF16 = 2,
  LOCKSTEP_I32 = 3,
  LOCKSTEP_I64 = 4,
  LOCKSTEP_U8 = 5,
  LOCKSTEP_F16 = 6
};
enum lockstep_op { LOCKSTEP_SUM = 0, LOCKSTEP_MIN = 1, LOCKSTEP_MAX = 2, LOCKSTEP_PROD = 3 };

/* Afterwards every rank's `count` values are the reduction of all ranks'. */
int lockstep_all_reduce(lockstep_group* group, void* values, size_t count, int dtype, int op);
/* Afterwards rank `root`'s are that, and those of the other ranks as before. */
int lockstep_reduce(lockstep_group* group, void* values, size_t count, int dtype, int op, int root);
/* Afterwards they are rank `root`'s. */
int lockstep_broadcast(lockstep_group* group, void* values, size_t count, int dtype, int root);
/* `all` gets every rank's `count` values, in rank order. The two do not overlap. */
int lockstep_all_gather(lockstep_group* group, const void* mine, size_t count, int dtype, void* all);
/* `all` are `count` values for each rank, in rank order; `mine` gets the reduction of this rank's. They do not overlap.
 */
int lockstep_reduce_scatter(lockstep_group* group, const void* all, void* mine, size_t count, int dtype, int op);
/* `from` are `count` values for each rank, in rank order, and `to` gets as many of each rank. They do not overlap. */
int lockstep_all_to_all(lockstep_group* group, const void* from, void* to, size_t count, int dtype);
/* The same with counts for and of each rank, as many as there are ranks. */
int lockstep_all_to_all_v(lockstep_group* group, const void* from, const size_t* from_counts, void* to,
                          const size_t* to_counts, int dtype);
/* Returns when every rank has called it. */
int lockstep_barrier(lockstep_group* group);

/* ---- Sends and receives, between two ranks ---- */

/* What one rank sends to another is received in the order sent: as many values of the same type. Blocking: a send may
 * wait for its receive. */
int lockstep_send(lockstep_group* group, const void* values, size_t count, int dtype, int to);
int lockstep_recv(lockstep_group* group, void* values, size_t count, int dtype, int from);

/* A ticket: a plain value. */
typedef struct lockstep_transfer {
  lockstep_group* group;
  uint64_t number;
} lockstep_transfer;

/* They start it and return. The values stay, and are left alone, until it is done or has failed, or the group is
 * destroyed. */
int lockstep_isend(lockstep_group* group, const void* values, size_t count, int dtype, int to,
                   lockstep_transfer* transfer);
int lockstep_irecv(lockstep_group* group, void* values, size_t count, int dtype, int from, lockstep_transfer* transfer);
/* Waits until it is done, for the group's timeout. Once for each. */
int lockstep_transfer_wait(lockstep_transfer transfer);
/* Whether it is, without waiting; lets it advance. It is to be waited for even so. */
int lockstep_transfer_done(lockstep_transfer transfer, int* done);

/* ---- Collectives on shared memory: they copy nothing, and several may be under way ---- */

typedef struct lockstep_arena lockstep_arena;

/* A ticket: a plain value. Operations of a group finish in the order in which they were issued. */
typedef struct lockstep_work {
  lockstep_group* group;
  uint64_t sequence;
} lockstep_work;

/* Collective: `bytes` of zeroed memory on every rank. */
int lockstep_arena_allocate(lockstep_group* group, size_t bytes, lockstep_arena** arena);
/* Where it is, to be read and written while no operation on it is under way; good until the arena is destroyed. */
int lockstep_arena_data(lockstep_arena* arena, void** data);
int lockstep_arena_bytes(lockstep_arena* arena, size_t* bytes);
/* When no operation on it is under way. Where one is, the memory stays until the process ends, and the group is broken.
 */
int lockstep_arena_destroy(lockstep_arena* arena);

/* They start an operation on `count` elements from byte `offset` of the arena. `work` may be NULL. */
int lockstep_arena_all_reduce(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op,
                              lockstep_work* work);
int lockstep_arena_reduce(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op, int root,
                          lockstep_work* work);
int lockstep_arena_broadcast(lockstep_arena* arena, size_t offset, size_t count, int dtype, int root,
                             lockstep_work* work);
/* Each rank contributes its slice; afterwards every rank has all of them. */
int lockstep_arena_all_gather(lockstep_arena* arena, size_t offset, size_t count, int dtype, lockstep_work* work);
/* Afterwards each rank's slice is the reduction; the rest is unspecified. */
int lockstep_arena_reduce_scatter(lockstep_arena* arena, size_t offset, size_t count, int dtype, int op,
                                  lockstep_work* work);
/* Rank `rank`'s slice of `count` elements: contiguous, in rank order, cut at multiples of 64 bytes. */
int lockstep_slice(lockstep_group* group, size_t count, int dtype, int rank, size_t* first, size_t* elements);

/* Waits until it is complete, for the group's timeout. */
int lockstep_work_wait(lockstep_work work);
/* Whether it is, without waiting; lets it advance. */
int lockstep_work_done(lockstep_work work, int* done);

/* ---- The reducer: gradients are summed bucket by bucket, while others are computed ---- */

typedef struct lockstep_reducer lockstep_reducer;

typedef struct lockstep_slot {
  const char* name; /* for messages; copied */
  size_t count;     /* f32 values */
} lockstep_slot;

typedef struct lockstep_reducer_options {
  size_t size;               /* of this struct, as the caller knows it */
  size_t first_bucket_bytes; /* small, so that the first sum begins early */
  size_t bucket_bytes;
  int find_unused; /* not 0: gradients may be absent */
} lockstep_reducer_options;

int lockstep_reducer_options_init(lockstep_reducer_options* options, size_t size);

/* Collective: compares slots and options. Slots are in the order in which parameters were made; what backward computes
 * first is usually the last of them. `options` may be NULL. */
int lockstep_reducer_make(lockstep_group* group, const lockstep_slot* slots, size_t count,
                          const lockstep_reducer_options* options, lockstep_reducer** reducer);
/* Where gradient `slot` is written, and its number of values; good until the reducer is destroyed. */
int lockstep_reducer_gradient(lockstep_reducer* reducer, size_t slot, float** values, size_t* count);

/* A step: begin, then for each slot ready or unused, in any order, then finish. Values are scaled by the caller, for
 * instance by 1 / the number of samples of all ranks. */
int lockstep_reducer_begin_step(lockstep_reducer* reducer, int64_t step);
/* Gradient `slot` is complete in its place: the sum of its bucket may begin. */
int lockstep_reducer_mark_ready(lockstep_reducer* reducer, size_t slot);
/* This rank has no gradient `slot` in this step. */
int lockstep_reducer_mark_unused(lockstep_reducer* reducer, size_t slot);
/* This rank has no samples in this step: zeros for every slot. */
int lockstep_reducer_contribute_nothing(lockstep_reducer* reducer);
/* Lets sums advance; to be called now and then while gradients are computed. */
int lockstep_reducer_poll(lockstep_reducer* reducer);
/* Of a bucket whose sums are there: its slots, good until it returns. 0: continue; everything else ends the step as
 * LOCKSTEP_ERROR_USAGE, with other ranks in it: end the process then. It runs on the thread that has called
 * lockstep_reducer_finish(), with `user` as given there. It calls no function of this group or reducer but
 * lockstep_reducer_gradient(). */
typedef int (*lockstep_on_bucket)(void* user, const size_t* slots, size_t count);
/* Waits for the sums, bucket by bucket. `on_bucket` may be NULL. */
int lockstep_reducer_finish(lockstep_reducer* reducer, lockstep_on_bucket on_bucket, void* user);
int lockstep_reducer_destroy(lockstep_reducer* reducer);

#ifdef __cplusplus
}
#endif

#endif
