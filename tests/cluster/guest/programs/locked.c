// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Locked memory of a process that uses the C library.
 *
 *   locked transfer NODE: 4 threads write, read and compare 4 MiB each
 *   locked register MIB COUNT MAX: registers and deregisters MIB of memory COUNT times, with at
 *   most MAX MiB pinned
 *
 * Prints "all is well" at the end.
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

static void check(const char *what, int64_t err)
{
	if (err >= 0)
		return;
	printf("%s: %s\n", what, strerror(-err));
	exit(1);
}

static void *transfer_one(void *number)
{
	uint64_t offset = (uintptr_t)number * SIZE;
	char *wrote = malloc(SIZE), *read = calloc(1, SIZE);

	for (int i = 0; i < SIZE; i++)
		wrote[i] = (i ^ (i >> 12)) + (uintptr_t)number;
	check("LT_write", LT_write(lh, offset, wrote, SIZE));
	check("LT_read", LT_read(lh, offset, read, SIZE));
	if (memcmp(wrote, read, SIZE)) {
		puts("read other bytes than were written");
		exit(1);
	}
	free(wrote);
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

static void register_often(size_t mib, int count, long max)
{
	void *memory = aligned_alloc(4096, mib << 20);
	uint32_t key;

	memset(memory, 1, mib << 20);
	while (count--) {
		check("kr_reg_mr", kr_reg_mr(memory, mib << 20, 0, &key));
		if (pinned_mib() > max) {
			printf("%ld MiB are pinned\n", pinned_mib());
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
		register_often(atoi(argv[2]), atoi(argv[3]), atol(argv[4]));
	puts("all is well");
	return 0;
}
