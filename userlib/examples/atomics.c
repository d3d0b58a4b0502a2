// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Counts in memory of node argv[1] (default 1), under a spin lock that all nodes can acquire.
 * cc atomics.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOCK 0
#define COUNT 8

int main(int argc, char **argv)
{
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	uint64_t before = 0, was = 0;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : LT_malloc(&node, 1, 4096, NULL, 0);
	int err = lh < 0 ? (int)lh : 0;

	while (!err) {
		int taken = LT_test_set(lh, LOCK);

		if (taken == 1)
			break;
		err = taken;
	}
	if (!err)
		err = LT_fetch_add(lh, COUNT, 5, &before);
	if (!err)
		err = LT_compare_swap(lh, COUNT, 5, 7, &was);
	if (!err)
		err = LT_swap(lh, LOCK, 0, NULL);
	if (err) {
		fprintf(stderr, "atomics: %s\n", strerror(-err));
		return 1;
	}
	printf("was %d, then %d\n", (int)before, (int)was);
	return LT_free(lh) < 0;
}
