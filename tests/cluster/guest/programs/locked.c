// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Test of the locked memory of a process that uses the C library.
 *
 *   locked transfer NODE: 4 threads write, read and compare 4 MiB each
 *   locked register MIB COUNT MAX: registers and deregisters MIB of memory COUNT times, with at
 *   most MAX MiB pinned
 *
 * Prints "passed" at the end.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kite/krcore.h>
#include <kite/lite.h>

enum { THREADS = 4, SIZE = 4 << 20 };

static LT_lh lh;

static void check(const char *function, int64_t err)
{
	if (err >= 0)
		return;
	printf("%s: %s\n", function, strerror(-err));
	exit(1);
}

/* Writes and reads one part of the region. */
static void *transfer_one(void *number)
{
	uint64_t offset = (uintptr_t)number * SIZE;
	char *written = malloc(SIZE), *read = calloc(1, SIZE);

	for (int i = 0; i < SIZE; i++)
		written[i] = (i ^ (i >> 12)) + (uintptr_t)number;
	check("LT_write", LT_write(lh, offset, written, SIZE));
	check("LT_read", LT_read(lh, offset, read, SIZE));
	if (memcmp(written, read, SIZE)) {
		puts("LT_read returned other bytes than LT_write wrote");
		exit(1);
	}
	free(written);
	free(read);
	return NULL;
}

static void transfer(uint32_t node)
{
	pthread_t threads[THREADS];

	lh = LT_malloc(&node, 1, THREADS * (uint64_t)SIZE, NULL, 0);
	check("LT_malloc", lh);
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, transfer_one, (void *)i);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	check("LT_free", LT_free(lh));
}

/* Returns the pinned memory of the process in MiB. */
static long pinned_mib(void)
{
	FILE *status = fopen("/proc/self/status", "r");
	char line[256];
	long kib = 0;

	while (fgets(line, sizeof(line), status))
		if (sscanf(line, "VmPin: %ld", &kib) == 1)
			break;
	fclose(status);
	return kib >> 10;
}

static void register_repeatedly(size_t mib, int count, long max)
{
	void *memory = aligned_alloc(4096, mib << 20);
	uint32_t key;

	memset(memory, 1, mib << 20);
	while (count--) {
		check("kr_reg_mr", kr_reg_mr(memory, mib << 20, 0, &key));
		if (pinned_mib() > max) {
			printf("%ld MiB pinned, at most %ld expected\n", pinned_mib(), max);
			exit(1);
		}
		check("kr_dereg_mr", kr_dereg_mr(key));
	}
}

int main(int argc, char **argv)
{
	check("LT_join", LT_join(NULL));
	if (argc == 3)
		transfer(atoi(argv[2]));
	else
		register_repeatedly(atoi(argv[2]), atoi(argv[3]), atol(argv[4]));
	puts("passed");
	return 0;
}
