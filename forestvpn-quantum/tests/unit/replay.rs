//! The kernel's table of edge counters (selftest/counter.c, as listed in the protocol notes 2.2) and a model.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const W: u64 = 8128;
const L: u64 = W + 1;
const R: u64 = REJECT_AFTER_MESSAGES;

/// Feeds counters and compares each verdict; the quick check must foretell it.
fn expect(window: &mut Window, steps: impl IntoIterator<Item = (u64, bool)>) {
    for (i, (counter, ok)) in steps.into_iter().enumerate() {
        assert_eq!(window.check(counter), ok, "check, step {i}: {counter}");
        assert_eq!(window.accept(counter), ok, "accept, step {i}: {counter}");
    }
}

//@test C-RPL-1
//@test C-RPL-3
#[test]
fn edge_counters_get_the_kernels_verdicts() {
    let mut w = Window::new();
    expect(
        &mut w,
        [
            (0, true),
            (1, true),
            (1, false),
            (9, true),
            (8, true),
            (7, true),
            (7, false),
            (L, true),
            (L - 1, true),
            (L - 1, false),
            (L - 2, true),
            (2, true),
            (2, false),
            (L + 16, true),
            (3, false),
            (L + 16, false),
            (4 * L, true),
            (4 * L - (L - 1), true),
            (10, false),
            (4 * L - L, false),
            (4 * L - (L + 1), false),
            (4 * L - (L - 2), true),
            (4 * L + 1 - L, false),
            (0, false),
            (R, false),
            (R - 1, true),
            (R, false),
            (R - 1, false),
            (R - 2, true),
            (R + 1, false),
            (R + 2, false),
            (R - 2, false),
            (R - 3, true),
            (0, false),
            (u64::MAX, false),
        ],
    );
}

//@test C-RPL-1
#[test]
fn a_full_window_in_order_or_backwards_is_accepted_exactly_once() {
    let ok = |n: u64| (n, true);
    let no = |n: u64| (n, false);
    expect(&mut Window::new(), (1..=W).map(ok).chain([ok(0), no(0)]));
    expect(&mut Window::new(), (2..=W + 1).map(ok).chain([ok(1), no(0)]));
    expect(&mut Window::new(), (0..=W).rev().map(ok));
    expect(&mut Window::new(), (1..=W + 1).rev().map(ok).chain([no(0)]));
    expect(&mut Window::new(), (1..=W).rev().map(ok).chain([ok(W + 1), no(0)]));
    expect(&mut Window::new(), (1..=W).rev().map(ok).chain([ok(0), ok(W + 1)]));
}

// F05
//@test C-RPL-1
#[test]
fn the_first_counter_of_a_session_is_accepted_once() {
    expect(&mut Window::new(), [(0, true), (0, false), (1, true)]);
}

// F06
//@test C-RPL-1
#[test]
fn packets_7900_late_are_accepted_once_and_9000_late_refused() {
    let n = 10_000;
    let mut w = Window::new();
    expect(&mut w, [(n, true)]);
    expect(&mut w, (n - 7900..n).rev().map(|c| (c, true)));
    expect(&mut w, (n - 7900..=n).map(|c| (c, false)));
    expect(&mut w, [(n - 9000, false)]);
    assert!(w.fell_out(n - 9000) && w.fell_out(n - L) && !w.fell_out(n - W));
}

// F07
//@test C-RPL-2
#[test]
fn asking_about_a_forged_counter_changes_nothing() {
    let mut w = Window::new();
    expect(&mut w, [(0, true), (5, true)]);
    assert!(w.check(1 << 40));
    assert!(w.check(R - 1));
    expect(&mut w, [(4, true), (5, false), (6, true), (0, false)]);
}

//@test C-RPL-3
#[test]
fn a_jump_over_the_whole_range_forgets_the_old_round() {
    let mut w = Window::new();
    // Same ring slots as the counters near R - 1, so that a word left uncleared would show.
    expect(&mut w, (0..8192).map(|c| (c, true)));
    expect(&mut w, [(R - 1, true)]);
    expect(&mut w, (R - 1 - W..R - 1).map(|c| (c, true)));
    expect(&mut w, [(R - 2 - W, false)]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Against a set and two comparisons.
    //@test C-RPL-1
    #[test]
    fn verdicts_agree_with_a_set_of_everything_seen(
        start in prop_oneof![Just(0u64), Just(R - 40_000), any::<u64>().prop_map(|n| n % R)],
        steps in prop::collection::vec((0u8..8, 0u64..20_000), 1..400),
    ) {
        let mut window = Window::new();
        let mut seen = BTreeSet::new();
        let mut base = start;
        for (kind, by) in steps {
            let counter = match kind {
                0 => base.saturating_add(by),
                1 => base.saturating_sub(by),
                2 => base.saturating_sub(W),
                3 => base.saturating_sub(L),
                4 => base.saturating_add(1),
                5 => by,
                _ => base.saturating_sub(by % 64),
            };
            let newest = seen.last().copied().unwrap_or(0);
            let fresh = counter < R
                && !seen.contains(&counter)
                && (counter > newest || newest - counter <= W);
            prop_assert_eq!(window.check(counter), fresh);
            prop_assert_eq!(window.accept(counter), fresh);
            if fresh {
                seen.insert(counter);
                base = base.max(counter);
            }
        }
    }
}
