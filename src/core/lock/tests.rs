// SPDX-License-Identifier: GPL-2.0

//! Tests of one line here; of the whole protocol, by trying all that can happen, in `model`.

use super::*;
use proptest::prelude::*;

mod model;

const EXCLUSIVE: Claim = Claim {
    shared: false,
    turn: Turn::Waits,
};
const SHARED: Claim = Claim {
    shared: true,
    ..EXCLUSIVE
};
const HAS: Turn = Turn::Has { warned: false };
const WARNED: Turn = Turn::Has { warned: true };

/// How far each claim of a line has come.
fn turns(line: &mut [Claim]) -> Vec<Turn> {
    advance(line.iter_mut());
    line.iter().map(|claim| claim.turn).collect()
}

/// Ends a claim as the home does.
fn end(line: &mut Vec<Claim>, at: usize, how: End) {
    let rest = line[at].end(how);
    if rest != Rest::Itself {
        line.remove(at);
    }
    if rest == Rest::Neither {
        let died = line.iter().position(|claim| claim.turn == Turn::Died);
        line.remove(died.unwrap());
    }
    advance(line.iter_mut());
}

#[test]
fn the_first_has_the_lock() {
    let mut line = vec![EXCLUSIVE, EXCLUSIVE, SHARED];
    assert_eq!(turns(&mut line), [HAS, Turn::Waits, Turn::Waits]);
    end(&mut line, 0, End::Unlocked);
    assert_eq!(turns(&mut line), [HAS, Turn::Waits]);
}

#[test]
fn those_who_share_have_it_together_and_overtake_nobody() {
    let mut line = vec![SHARED, SHARED, EXCLUSIVE, SHARED];
    let all = [HAS, HAS, Turn::Waits, Turn::Waits];
    assert_eq!(turns(&mut line), all);
    end(&mut line, 0, End::Unlocked);
    assert_eq!(turns(&mut line), [HAS, Turn::Waits, Turn::Waits]);
    end(&mut line, 1, End::GivenUp);
    assert_eq!(turns(&mut line), [HAS, HAS]);
}

#[test]
fn who_comes_after_a_death_is_warned_until_one_has_unlocked() {
    let mut line = vec![EXCLUSIVE, SHARED, EXCLUSIVE, EXCLUSIVE, EXCLUSIVE];
    advance(line.iter_mut());
    end(&mut line, 0, End::Died);
    assert_eq!(turns(&mut line)[..3], [Turn::Died, WARNED, Turn::Waits]);
    // Neither who shares, nor who dies, nor who gives up, mends anything.
    end(&mut line, 1, End::Unlocked);
    assert_eq!(turns(&mut line)[..2], [Turn::Died, WARNED]);
    end(&mut line, 1, End::Died);
    assert_eq!(turns(&mut line)[..2], [Turn::Died, WARNED]);
    end(&mut line, 1, End::GivenUp);
    assert_eq!(turns(&mut line), [Turn::Died, WARNED]);
    end(&mut line, 1, End::Unlocked);
    line.push(EXCLUSIVE);
    assert_eq!(turns(&mut line), [HAS]);
}

#[test]
fn who_shared_or_waited_leaves_no_trace() {
    let mut line = vec![SHARED, EXCLUSIVE, EXCLUSIVE];
    advance(line.iter_mut());
    end(&mut line, 2, End::Died);
    end(&mut line, 0, End::Died);
    assert_eq!(turns(&mut line), [HAS]);
}

proptest! {
    /// Whoever comes and goes, and however: the holders are one, or share, and nobody waits for nobody.
    #[test]
    fn a_lock_is_ones_or_shared(steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..200)) {
        let mut line = Vec::new();
        for (step, at) in steps {
            let ends = [End::Unlocked, End::GivenUp, End::Died];
            let live: Vec<usize> =
                (0..line.len()).filter(|&at: &usize| { let claim: &Claim = &line[at]; claim.turn != Turn::Died }).collect();
            match step {
                0 => line.push(EXCLUSIVE),
                1 => line.push(SHARED),
                step if !live.is_empty() => {
                    end(&mut line, *at.get(&live), ends[usize::from(step) - 2]);
                }
                _ => {}
            }
            let turns = turns(&mut line);
            let has = |claim: &&Claim| matches!(claim.turn, Turn::Has { .. });
            let holders: Vec<&Claim> = line.iter().filter(has).collect();
            prop_assert!(holders.len() <= 1 || holders.iter().all(|claim| claim.shared));
            prop_assert!(!holders.is_empty() || !turns.contains(&Turn::Waits));
            prop_assert!(turns.iter().filter(|turn| **turn == Turn::Died).count() <= 1);
        }
    }
}
