// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Checks of an access: state, domain, owner and rights of the key.

use super::*;

#[test]
fn access_without_its_right_is_denied() {
    let all = [
        Access::LocalRead,
        Access::LocalWrite,
        Access::RemoteRead,
        Access::RemoteWrite,
        Access::RemoteAtomic,
    ];
    for (taken, denied) in all.iter().enumerate() {
        let mut mkey = key(1, 0, 4096, pages(&[0x1000]));
        match denied {
            Access::LocalRead => set!(mkey.context, mkc, lr, 0u32),
            Access::LocalWrite => set!(mkey.context, mkc, lw, 0u32),
            Access::RemoteRead => set!(mkey.context, mkc, rr, 0u32),
            Access::RemoteWrite => set!(mkey.context, mkc, rw, 0u32),
            Access::RemoteAtomic => set!(mkey.context, mkc, a, 0u32),
        }
        let mut keys = new_keys();
        let number = add(&mut keys, mkey);
        for (asked, access) in all.iter().enumerate() {
            let found = look(&keys, number, *access, 0, 8).map(|_| ());
            let expected = if asked == taken {
                Err(MkeyFault::Rights)
            } else {
                Ok(())
            };
            assert_eq!(found, expected, "{access:?} of a key without {denied:?}");
        }
    }
}

#[test]
fn window_grants_peer_the_local_rights_of_region() {
    let mut region = key(1, 0, 4096, pages(&[0x1000]));
    set!(region.context, mkc, rr, 0u32);
    set!(region.context, mkc, rw, 0u32);
    let mut keys = new_keys();
    let region = add(&mut keys, region);
    let window = add(&mut keys, key(2, 0x100, 16, klm(16, region, 0x20)));
    let found = look(&keys, window, Access::RemoteWrite, 0x100, 16);
    assert_eq!(found.map(|pieces| bytes(&pieces)[0]), Ok(0x1020));
    assert_eq!(
        look(&keys, region, Access::RemoteWrite, 0x20, 16),
        Err(MkeyFault::Rights)
    );
    if let Some(region) = keys.get_mut(region >> 8) {
        set!(region.context, mkc, lw, 0u32);
    }
    assert_eq!(
        look(&keys, window, Access::RemoteWrite, 0x100, 16),
        Err(MkeyFault::Rights)
    );
    assert!(look(&keys, window, Access::RemoteRead, 0x100, 16).is_ok());
}

#[test]
fn mismatched_key_returns_specific_fault() {
    let mut keys = new_keys();
    let number = add(
        &mut keys,
        key(1, 0, 8192, [pages(&[0x1000]), vec![0; 8]].concat()),
    );
    let of = |keys: &Table<Mkey>, number, user| {
        translate(keys, number, user, 0, 8, &mut |_, _| ()).map(|_| ())
    };
    let me = user(Access::LocalRead);
    assert_eq!(of(&keys, number, me), Ok(()));
    assert_eq!(of(&keys, number ^ 1, me), Err(MkeyFault::Key));
    assert_eq!(of(&keys, number + 0x100, me), Err(MkeyFault::Key));
    assert_eq!(
        of(&keys, number, User { pd: PD + 1, ..me }),
        Err(MkeyFault::Domain)
    );
    assert_eq!(
        look(&keys, number, Access::LocalRead, 4090, 8),
        Err(MkeyFault::Absent(Absent {
            key: number,
            address: 4096,
            length: 2
        }))
    );
    let change = |keys: &mut Table<Mkey>, act: fn(&mut [u8])| {
        act(&mut keys.get_mut(number >> 8).unwrap().context)
    };
    change(&mut keys, |context| set!(context, mkc, qpn, QP + 1));
    assert_eq!(of(&keys, number, me), Err(MkeyFault::Owner));
    assert_eq!(of(&keys, number, User { qp: QP + 1, ..me }), Ok(()));
    change(&mut keys, |context| set!(context, mkc, free, 1u32));
    assert_eq!(of(&keys, number, me), Err(MkeyFault::Free));
}

#[test]
fn check_covers_named_key_only() {
    let mut keys = new_keys();
    // The key in the table does not exist.
    let number = add(&mut keys, key(2, 0x1000, 1 << 30, klm(1 << 30, 7, 0)));
    let may = |access, address, length| check(&keys, number, user(access), address, length);
    assert_eq!(may(Access::RemoteWrite, 0x1000, 1 << 30), Ok(()));
    assert_eq!(
        may(Access::RemoteWrite, 0x1001, 1 << 30),
        Err(MkeyFault::Range)
    );
    let other = User {
        pd: PD + 1,
        ..user(Access::RemoteRead)
    };
    let denied = check(&keys, number, other, 0x1000, 8);
    assert_eq!(denied, Err(MkeyFault::Domain));
    assert_eq!(check(&keys, 7, other, 0, 0), Ok(()));
    assert_eq!(check(&keys, 7, other, 0, 1), Err(MkeyFault::Key));
}

#[test]
fn remote_access_to_null_key_is_denied() {
    let mut keys = new_keys();
    for access in [
        Access::RemoteRead,
        Access::RemoteWrite,
        Access::RemoteAtomic,
    ] {
        assert_eq!(look(&keys, NULL, access, 0, 8), Err(MkeyFault::Key));
    }
    // The owner may refer to the null key from another key.
    let number = add(&mut keys, key(2, 0, 4096, klm(4096, NULL, 0)));
    let found = look(&keys, number, Access::RemoteWrite, 0, 8);
    let length = 8;
    let place = Place::Null;
    assert_eq!(found, Ok(vec![Piece { place, length }]));
}

#[test]
fn remote_invalidation_requires_permission_of_key() {
    let mut keys = new_keys();
    let number = add(&mut keys, key(1, 0, 4096, pages(&[0x1000])));
    assert_eq!(
        invalidate(&mut keys, number, PD, QP),
        Err(MkeyFault::Rights)
    );
    if let Some(mkey) = keys.get_mut(number >> 8) {
        set!(mkey.context, mkc, en_rinval, 1u32);
        set!(mkey.context, mkc, umr_en, 1u32);
    }
    assert_eq!(
        invalidate(&mut keys, number ^ 1, PD, QP),
        Err(MkeyFault::Key)
    );
    assert_eq!(
        invalidate(&mut keys, number, PD + 1, QP),
        Err(MkeyFault::Domain)
    );
    assert_eq!(invalidate(&mut keys, number, PD, QP), Ok(()));
    assert_eq!(
        look(&keys, number, Access::LocalRead, 0, 8),
        Err(MkeyFault::Free)
    );
}
