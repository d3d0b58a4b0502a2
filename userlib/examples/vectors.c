// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Creates a table of three rows on node argv[1] (default 1), writes each column in one request,
 * and reads the table.
 * cc vectors.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 3

/* Bytes of a row, which has a name and a symbol, and offset of the symbol. */
#define ROW 16
#define SIGN 12

int main(int argc, char **argv)
{
	static char *names[ROWS] = {"copper", "silver", "gold"};
	static char *signs[ROWS] = {"Cu", "Ag", "Au"};
	struct LT_segment name[ROWS], sign[ROWS], line[ROWS];
	char lines[ROWS][ROW];
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	int own = LT_join(NULL);
	LT_lh table = own < 0 ? own : LT_malloc(&node, 1, ROWS * ROW, NULL, 0);
	int err = table < 0 ? (int)table : LT_memset(table, 0, ' ', ROWS * ROW);

	for (int i = 0; i < ROWS; i++) {
		name[i] = (struct LT_segment){i * ROW, names[i], strlen(names[i])};
		sign[i] = (struct LT_segment){i * ROW + SIGN, signs[i], strlen(signs[i])};
		/* Reads the rows in reverse order. */
		line[i] = (struct LT_segment){i * ROW, lines[ROWS - 1 - i], ROW};
	}
	if (!err)
		err = LT_writev(table, name, ROWS);
	if (!err)
		err = LT_writev(table, sign, ROWS);
	if (!err)
		err = LT_readv(table, line, ROWS);
	if (err) {
		fprintf(stderr, "vectors: %s\n", strerror(-err));
		return 1;
	}
	for (int i = 0; i < ROWS; i++)
		printf("%.*s\n", SIGN + 2, lines[i]);
	return LT_free(table) < 0;
}
