/* lockstep from C: a sum over the ranks, and gradients that are summed bucket by bucket. */
#include <lockstep/lockstep.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int code) {
  if (code == LOCKSTEP_OK) return;
  if (!lockstep_last_error_is_of_peer()) fprintf(stderr, "error: %s\n", lockstep_last_error());
  exit(code);
}

int main(void) {
  lockstep_group* group = NULL;
  lockstep_reducer* reducer = NULL;
  const lockstep_slot slots[] = {{"weight", 4}, {"bias", 1}};
  float values[3] = {1, 2, 3}, *weight = NULL, *bias = NULL;
  size_t weights = 0, biases = 0, i;
  int rank = 0, size = 0;

  check(lockstep_group_make(NULL, &group));
  check(lockstep_group_rank(group, &rank));
  check(lockstep_group_size(group, &size));
  check(lockstep_all_reduce(group, values, 3, LOCKSTEP_F32, LOCKSTEP_SUM));

  check(lockstep_reducer_make(group, slots, 2, NULL, &reducer));
  check(lockstep_reducer_gradient(reducer, 0, &weight, &weights));
  check(lockstep_reducer_gradient(reducer, 1, &bias, &biases));
  check(lockstep_reducer_begin_step(reducer, 0));
  *bias = 1;
  check(lockstep_reducer_mark_ready(reducer, 1)); /* while the next one is computed */
  for (i = 0; i < weights; ++i) weight[i] = (float)rank;
  check(lockstep_reducer_mark_ready(reducer, 0));
  check(lockstep_reducer_finish(reducer, NULL, NULL));

  if (rank == 0) printf("%d ranks: %g, gradients %g and %g\n", size, values[2], weight[3], *bias);
  check(lockstep_reducer_destroy(reducer));
  check(lockstep_group_shutdown(group));
  check(lockstep_group_destroy(group));
  return 0;
}
