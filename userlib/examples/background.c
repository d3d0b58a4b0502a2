// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Writes 16 MiB to memory of node argv[1] (default 1) with low priority: the writes yield to
 * requests of other programs.
 * cc background.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PART 1048576
#define PARTS 16

static int backup(uint32_t node)
{
	static char part[PART];
	LT_lh lh = LT_malloc(&node, 1, PARTS * PART, NULL, 0);
	int err = lh < 0 ? (int)lh : 0;

	for (int i = 0; !err && i < PARTS; i++) {
		memset(part, i, PART);
		err = LT_write(lh, (uint64_t)i * PART, part, PART);
	}
	if (!err)
		printf("%d MiB written\n", PARTS);
	return err;
}

int main(int argc, char **argv)
{
	int err = LT_join(NULL);

	if (err >= 0)
		err = LT_set_priority(LT_PRIORITY_LOW);
	if (!err)
		err = backup(argc > 1 ? strtoul(argv[1], NULL, 10) : 1);
	if (err < 0)
		fprintf(stderr, "background: %s\n", strerror(-err));
	return err < 0;
}
