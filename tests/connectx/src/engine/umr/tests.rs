// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of registration, invalidation and window binding by UMR.

use super::*;
use crate::device::DeviceId;
use crate::fabric::Port;
use crate::layout::put_be;
use crate::object::mkey::{self, MkeyFault, Piece, Place};
use crate::object::qp::{Attributes, QpState, Receive};

const PD: u32 = 3;

fn qp(transport: Transport) -> Qp {
    let attributes = Attributes {
        pd: PD,
        ..Attributes::default()
    };
    Qp {
        number: 0x41,
        state: QpState::Rts,
        transport,
        attributes,
        send: None,
        receive: Receive::None,
        requester: Default::default(),
        responder: Default::default(),
        context: [0; size!(qpc)],
    }
}

/// Adds a key in the free state, with room for eight pages. Returns its number, variant included.
fn free_key(device: &mut Device, mode: Mode) -> u32 {
    let mut context = [0; size!(mkc)];
    set!(context, mkc, free, 1u32);
    set!(context, mkc, umr_en, 1u32);
    set!(context, mkc, lr, 1u32);
    set!(context, mkc, pd, PD);
    set!(context, mkc, qpn, 0xff_ffffu32);
    set!(context, mkc, log_page_size, 12u32);
    let table = vec![0; 64];
    device
        .objects
        .mkeys
        .insert(Mkey::new(context, mode, table))
        .unwrap()
        << 8
}

/// Returns a request with this part of the table.
fn request(key: u32, flags: u8, mask: u64, context: [u8; size!(mkc)], entries: &[u64]) -> Vec<u8> {
    let mut wqe = vec![0; HEAD];
    put_be(&mut wqe, 12, 4, u64::from(key));
    wqe[UMR] = flags | flag::INLINE;
    put_be(&mut wqe, UMR + 8, 8, mask);
    wqe[CONTEXT..HEAD].copy_from_slice(&context);
    wqe.extend(entries.iter().flat_map(|entry| entry.to_be_bytes()));
    wqe.resize(HEAD + (entries.len() * 8).next_multiple_of(64), 0);
    let octowords = (wqe.len() - HEAD) / OCTOWORD;
    put_be(&mut wqe, UMR + 4, 2, octowords as u64);
    wqe
}

const REGISTER: u64 = mask::LENGTH | mask::START | mask::KEY | mask::FREE | mask::REMOTE_WRITE;

/// Returns a fast registration of two pages, with a new variant of the key.
fn register(key: u32) -> Vec<u8> {
    let mut context = [0; size!(mkc)];
    set!(context, mkc, start_addr, 0x5000u64);
    set!(context, mkc, len, 0x1800u64);
    set!(context, mkc, mkey_7_0, key & 0xff);
    set!(context, mkc, rw, 1u32);
    request(
        key,
        flag::MUST_BE_FREE,
        REGISTER,
        context,
        &[0x9003, 0x7003],
    )
}

fn invalidate(key: u32) -> Vec<u8> {
    let mut context = [0; size!(mkc)];
    set!(context, mkc, free, 1u32);
    request(key, 0, mask::FREE, context, &[])
}

fn find(device: &Device, key: u32, address: u64, length: u64) -> Result<Vec<Piece>, MkeyFault> {
    let user = User {
        pd: PD,
        qp: 0x41,
        access: Access::RemoteWrite,
    };
    mkey::translate(
        &device.objects.mkeys,
        key,
        user,
        address,
        length,
        &mut |_, _| (),
    )
}

fn device() -> Device {
    let port = Port {
        lid: 1,
        guid: 1,
        up: true,
    };
    Device::new(DeviceId::default(), port)
}

#[test]
fn key_is_valid_from_registration_until_invalidation() {
    let (mut device, qp) = (device(), qp(Transport::Rc));
    let old = free_key(&mut device, Mode::Mtt);
    let key = old | 5;
    assert_eq!(find(&device, old, 0x5ff8, 8), Err(MkeyFault::Free));
    assert_eq!(execute(&mut device, &qp, &register(key)), Ok(()));
    assert_eq!(find(&device, old, 0x5ff8, 8), Err(MkeyFault::Key));
    let pieces = [(0x9ff8, 8), (0x7000, 8)];
    let pieces = pieces.map(|(at, length)| Piece {
        place: Place::Guest(at),
        length,
    });
    assert_eq!(find(&device, key, 0x5ff8, 16).as_deref(), Ok(&pieces[..]));
    assert_eq!(find(&device, key, 0x67f8, 16), Err(MkeyFault::Range));
    // The key is no longer free, and a key with an old variant cannot be invalidated.
    assert_eq!(
        execute(&mut device, &qp, &register(key)),
        Err(Syndrome::WindowBind)
    );
    assert_eq!(
        execute(&mut device, &qp, &invalidate(old)),
        Err(Syndrome::WindowBind)
    );
    assert_eq!(execute(&mut device, &qp, &invalidate(key)), Ok(()));
    assert_eq!(find(&device, key, 0x5000, 8), Err(MkeyFault::Free));
}

#[test]
fn umr_with_offset_replaces_part_of_table() {
    let (mut device, qp) = (device(), qp(Transport::Umr));
    let key = free_key(&mut device, Mode::Mtt);
    let all: Vec<u64> = (1..=8).map(|page| (page << 12) | 3).collect();
    let mut context = [0; size!(mkc)];
    set!(context, mkc, len, 0x8000u64);
    set!(context, mkc, rw, 1u32);
    let bits = mask::FREE | mask::LENGTH | mask::REMOTE_WRITE;
    execute(&mut device, &qp, &request(key, 0, bits, context, &all)).unwrap();
    let table = |device: &Device| device.objects.mkeys.get(key >> 8).unwrap().table().to_vec();
    assert_eq!(
        table(&device),
        all.iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect::<Vec<u8>>()
    );
    // Two octowords at offset 2.
    let mut part = request(
        key,
        flag::OFFSET,
        0,
        [0; size!(mkc)],
        &[0xa003, 0xb003, 0xc003, 0xd003],
    );
    put_be(&mut part, UMR + 4, 2, 2);
    put_be(&mut part, UMR + 6, 2, 2);
    assert_eq!(execute(&mut device, &qp, &part), Ok(()));
    let expected = [
        0x1003, 0x2003, 0x3003, 0x4003, 0xa003, 0xb003, 0xc003, 0xd003u64,
    ];
    assert_eq!(
        table(&device),
        expected
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect::<Vec<u8>>()
    );
    // A part that exceeds the table changes nothing.
    put_be(&mut part, UMR + 6, 2, 3);
    assert_eq!(
        execute(&mut device, &qp, &part),
        Err(Syndrome::LocalQpOperation)
    );
}

#[test]
fn only_umr_qp_changes_protection_domain() {
    let mut device = device();
    let key = free_key(&mut device, Mode::Mtt);
    let mut context = [0; size!(mkc)];
    set!(context, mkc, pd, PD + 1);
    let change = request(key, 0, mask::DOMAIN, context, &[]);
    let user = qp(Transport::Rc);
    assert_eq!(
        execute(&mut device, &user, &change),
        Err(Syndrome::LocalQpOperation)
    );
    assert_eq!(execute(&mut device, &qp(Transport::Umr), &change), Ok(()));
    assert_eq!(
        execute(&mut device, &user, &register(key)),
        Err(Syndrome::WindowBind)
    );
}

#[test]
fn bound_window_rejects_other_qp() {
    let mut device = device();
    let window = free_key(&mut device, Mode::Klm);
    let mut context = [0; size!(mkc)];
    set!(context, mkc, qpn, 0x42u32);
    let bind = request(window, flag::OFFSET, mask::FREE | mask::QP, context, &[]);
    assert_eq!(execute(&mut device, &qp(Transport::Rc), &bind), Ok(()));
    assert_eq!(find(&device, window, 0, 8), Err(MkeyFault::Owner));
    let mut unbind = invalidate(window);
    unbind[UMR] |= flag::CHECK_QP | flag::OFFSET;
    let unbound = free_key(&mut device, Mode::Klm);
    let mut own = unbind.clone();
    put_be(&mut own, 12, 4, u64::from(unbound));
    assert_eq!(execute(&mut device, &qp(Transport::Rc), &own), Ok(()));
    assert_eq!(
        execute(&mut device, &qp(Transport::Rc), &unbind),
        Err(Syndrome::WindowBind)
    );
    let owner = Qp {
        number: 0x42,
        ..qp(Transport::Rc)
    };
    assert_eq!(execute(&mut device, &owner, &unbind), Ok(()));
}

#[test]
fn truncated_umr_is_rejected() {
    let mut device = device();
    let key = free_key(&mut device, Mode::Mtt);
    let whole = register(key);
    for length in 0..whole.len() {
        let done = execute(&mut device, &qp(Transport::Rc), &whole[..length]);
        assert_eq!(done, Err(Syndrome::LocalQpOperation), "{length} bytes");
    }
    assert_eq!(execute(&mut device, &qp(Transport::Rc), &whole), Ok(()));
}
