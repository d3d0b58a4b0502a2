// SPDX-License-Identifier: GPL-2.0

//! Tests of the parent module: exact cases at chunk boundaries, and properties against a plain model.

use super::*;
use proptest::prelude::*;

const PAGE: u64 = 1 << PAGE_SHIFT;

/// Layouts with few and with very many chunks, often with an end near a chunk boundary.
fn layouts() -> impl Strategy<Value = Layout> {
    let few = |shift: u8| 1..=(20u64 << shift);
    let border = |shift: u8| (1u64..1000, 0u64..3).prop_map(move |(n, d)| (n << shift) + d - 1);
    let any = |shift: u8| 1..=u64::from(u32::MAX) << shift;
    (PAGE_SHIFT..=MAX_CHUNK_SHIFT)
        .prop_flat_map(move |shift| {
            (
                prop_oneof![few(shift), border(shift), any(shift)],
                Just(shift),
            )
        })
        .prop_map(|(len, shift)| Layout::new(len, shift).unwrap())
}

fn ranges() -> impl Strategy<Value = (Layout, u64, u64)> {
    layouts().prop_flat_map(|layout| {
        let most = layout.len().min(5000 << layout.shift());
        (Just(layout), 0..=layout.len(), 0..=most)
            .prop_map(|(layout, offset, len)| (layout, offset, len.min(layout.len() - offset)))
    })
}

#[test]
fn layout_with_invalid_size_or_shift_is_rejected() {
    assert_eq!(Layout::new(0, PAGE_SHIFT), None);
    assert_eq!(Layout::new(1, PAGE_SHIFT - 1), None);
    assert_eq!(Layout::new(1, MAX_CHUNK_SHIFT + 1), None);
    assert_eq!(Layout::new(1, u8::MAX), None);
    assert_eq!(Layout::new(u64::MAX, MAX_CHUNK_SHIFT), None);
    let most = u64::from(u32::MAX) << PAGE_SHIFT;
    assert_eq!(
        Layout::new(most, PAGE_SHIFT).map(|l| l.chunk_count()),
        Some(u32::MAX)
    );
    assert_eq!(Layout::new(most + 1, PAGE_SHIFT), None);
}

#[test]
fn last_chunk_of_partial_region_is_shorter() {
    let layout = Layout::new(3 * PAGE + 1, 13).unwrap();
    assert_eq!(
        (layout.len(), layout.shift(), layout.chunk_count()),
        (12289, 13, 2)
    );
    assert_eq!(
        [0, 1, 2, u32::MAX].map(|i| layout.chunk_len(i)),
        [8192, 4097, 0, 0]
    );
    assert_eq!(
        [0, 1, 2, u32::MAX].map(|i| layout.chunk_pages(i)),
        [2, 2, 0, 0]
    );
}

#[test]
fn pieces_split_at_chunk_boundaries() {
    let layout = Layout::new(3 * PAGE, PAGE_SHIFT).unwrap();
    let pieces: Vec<_> = layout.pieces(PAGE - 1, PAGE + 2).unwrap().collect();
    let piece = |chunk, offset, len, at| Piece {
        chunk,
        offset,
        len,
        buffer_offset: at,
    };
    assert_eq!(
        pieces,
        [
            piece(0, 4095, 1, 0),
            piece(1, 0, 4096, 1),
            piece(2, 0, 1, 4097)
        ]
    );
}

#[test]
fn pieces_beyond_the_region_are_rejected() {
    let layout = Layout::new(100, PAGE_SHIFT).unwrap();
    assert_eq!(layout.pieces(100, 0).unwrap().count(), 0);
    for (offset, len) in [
        (101, 0),
        (100, 1),
        (0, 101),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        assert_eq!(layout.pieces(offset, len).err(), Some(OutOfRange));
    }
}

#[test]
fn initial_shift_is_clamped() {
    let cases = [
        (0, 12),
        (1, 12),
        (4096, 12),
        (4097, 13),
        (8192, 13),
        (1 << 22, 22),
    ];
    for (len, shift) in cases
        .into_iter()
        .chain([((1 << 22) + 1, 22), (u64::MAX, 22)])
    {
        assert_eq!(initial_shift(len), shift, "{len}");
    }
}

#[test]
fn stripe_share_of_missing_node_is_empty() {
    let layout = Layout::new(2 * PAGE, PAGE_SHIFT).unwrap();
    let empty = StripeShare {
        chunk_count: 0,
        last_chunk_len: 0,
    };
    for (k, n) in [(0, 0), (3, 3), (2, 3), (usize::MAX, usize::MAX)] {
        assert_eq!(stripe_share(&layout, k, n), empty);
    }
    assert_eq!(empty.layout(PAGE_SHIFT), None);
    assert_eq!(stripe_index(5, 0), 0);
}

#[test]
fn stripe_share_with_invalid_chunks_has_no_layout() {
    let layout = |chunks, tail, shift| {
        StripeShare {
            chunk_count: chunks,
            last_chunk_len: tail,
        }
        .layout(shift)
    };
    assert_eq!(layout(2, 1, 12), Layout::new(4097, 12));
    assert_eq!(layout(2, 4096, 12), Layout::new(8192, 12));
    for (chunks, tail, shift) in [
        (0, 1, 12),
        (1, 0, 12),
        (1, 4097, 12),
        (1, 1, 11),
        (1, 1, 255),
    ] {
        assert_eq!(layout(chunks, tail, shift), None);
    }
}

proptest! {
    #[test]
    fn chunk_lengths_sum_to_the_region(len in 1..=3000 * PAGE, shift in PAGE_SHIFT..=MAX_CHUNK_SHIFT) {
        let layout = Layout::new(len, shift).unwrap();
        let lens: Vec<u64> = (0..layout.chunk_count()).map(|i| layout.chunk_len(i).into()).collect();
        prop_assert_eq!(lens.iter().sum::<u64>(), len);
        prop_assert!(lens.iter().rev().skip(1).all(|len| *len == 1 << shift));
        for (i, len) in lens.iter().enumerate() {
            prop_assert!(*len > 0);
            prop_assert_eq!(u64::from(layout.chunk_pages(i as u32)), len.div_ceil(PAGE));
        }
    }

    #[test]
    fn pieces_cover_the_range_in_order((layout, offset, len) in ranges()) {
        let mut at = 0;
        for piece in layout.pieces(offset, len).unwrap() {
            let start = (u64::from(piece.chunk) << layout.shift()) + u64::from(piece.offset);
            prop_assert_eq!((piece.buffer_offset, start), (at, offset + at));
            prop_assert!(piece.len > 0 && piece.chunk < layout.chunk_count());
            prop_assert!(piece.offset + piece.len <= layout.chunk_len(piece.chunk));
            at += u64::from(piece.len);
        }
        prop_assert_eq!(at, len);
    }

    #[test]
    fn pieces_are_one_per_touched_chunk((layout, offset, len) in ranges()) {
        let pieces = layout.pieces(offset, len).unwrap();
        let first = offset >> layout.shift();
        let chunks = if len == 0 { 0 } else { ((offset + len - 1) >> layout.shift()) - first + 1 };
        prop_assert_eq!(pieces.count() as u64, chunks);
    }

    #[test]
    fn pieces_accept_exactly_the_ranges_in_the_region(layout in layouts(), offset: u64, len: u64) {
        let inside = u128::from(offset) + u128::from(len) <= u128::from(layout.len());
        prop_assert_eq!(layout.pieces(offset, len).is_ok(), inside);
        let (offset, len) = (offset % (layout.len() + 2), len % (layout.len() + 2));
        prop_assert_eq!(layout.pieces(offset, len).is_ok(), offset + len <= layout.len());
    }

    #[test]
    fn initial_shift_is_the_smallest_that_fits(len in prop_oneof![1..=5u64 << 22, 1u64..]) {
        let shift = initial_shift(len);
        prop_assert!((PAGE_SHIFT..=MAX_CHUNK_SHIFT).contains(&shift));
        prop_assert!(len <= 1 << shift || shift == MAX_CHUNK_SHIFT);
        prop_assert!(len > 1 << (shift - 1) || shift == PAGE_SHIFT);
    }

    #[test]
    fn stripe_shares_sum_to_the_layout(layout in layouts(), n in 1usize..70) {
        let shares: Vec<_> = (0..n).map(|k| stripe_share(&layout, k, n)).collect();
        let parts = shares.iter().filter(|share| share.chunk_count > 0);
        let parts: Vec<_> = parts.map(|share| share.layout(layout.shift()).unwrap()).collect();
        prop_assert_eq!(parts.iter().map(Layout::len).sum::<u64>(), layout.len());
        prop_assert_eq!(parts.iter().map(|part| u64::from(part.chunk_count())).sum::<u64>(), u64::from(layout.chunk_count()));
        let (most, least) = (shares[0].chunk_count, shares[n - 1].chunk_count);
        prop_assert!(most - least <= 1);
    }

    #[test]
    fn stripe_share_equals_chunks_of_stripe_index(len in 1..=400 * PAGE, n in 1usize..70) {
        let layout = Layout::new(len, PAGE_SHIFT).unwrap();
        for k in 0..n {
            let mine = (0..layout.chunk_count()).filter(|chunk| stripe_index(*chunk, n) == k);
            let lens: Vec<_> = mine.map(|chunk| layout.chunk_len(chunk)).collect();
            let expected = StripeShare { chunk_count: lens.len() as u32, last_chunk_len: lens.last().copied().unwrap_or(0) };
            prop_assert_eq!(stripe_share(&layout, k, n), expected);
        }
    }
}
